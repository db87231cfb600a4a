"""Head gates: the distribution against its formula, removal against gates of zero, budgets, resuming and bad input."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from smelt.compression.allocation.unit_search import KeptUnits
from smelt.compression.base import CalibrationSize, MethodContext
from smelt.compression.budget import Budget
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.methods import METHODS
from smelt.compression.pruning.gated import GatedStudent, gated, gated_parts
from smelt.compression.pruning.head_gates import (
    HardConcreteGates,
    HeadGates,
    binarize,
    hard_concrete,
    open_probability,
    output_scale,
)
from smelt.compression.pruning.repair import cut
from smelt.errors import BudgetError, DataError, ModelError, RecipeError
from smelt.measure.cost import block_parameters, unit_parameters
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.surgery import keep_units, scale_units
from smelt.train.trainer.config import OptimizerConfig
from smelt.train.trainer.trainer import Trainer
from tests.tiny import BUILDS, inputs, labeled
from tests.trained import character_batches, character_model

BETA = 0.333
GATED = ("bert", "mpnet", "vit", "gpt2", "opt", "llama", "qwen3", "all-attention")
PLAIN = {"initial_logit": 0.0, "penalty_warmup": 0.0, "scale_output": False}


def apply(model: Model, batches: list[dict[str, Tensor]], folder: Path, **settings: Any) -> dict[str, Any]:
    step = {"method": "head-gates", "epochs": 4, "batch_size": 6, "optimizer": {"lr": 1e-3}, **settings}
    return METHODS.build(step).apply(model, MethodContext(batches=batches, folder=folder))


def batches(name: str, count: int = 8) -> list[dict[str, Tensor]]:
    return [labeled(name, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("logit", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("beta", [BETA, 1.0])
def test_gates_are_distributed_as_published(logit: float, beta: float) -> None:
    """The closed form of the distribution (Louizos et al., section 2.2) against samples."""
    noise = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gates = hard_concrete(torch.full_like(noise, logit), noise, beta)
    assert float(gates.min()) >= 0 and float(gates.max()) <= 1

    def below(value: float) -> float:
        stretched = (value + 0.1) / 1.2
        return 1 / (1 + math.exp(-(beta * (math.log(stretched) - math.log(1 - stretched)) - logit)))

    for value in (0.01, 0.25, 0.5, 0.9):
        assert float((gates <= value).double().mean()) == pytest.approx(below(value), abs=0.005)
    not_zero = float((gates > 0).double().mean())
    assert float(open_probability(torch.tensor(logit), beta)) == pytest.approx(not_zero, abs=0.005)
    assert float((gates == 1).double().mean()) == pytest.approx(1 - below(1.0), abs=0.005)
    assert float((gates >= 0.5).double().mean()) == pytest.approx(1 / (1 + math.exp(-logit)), abs=0.005)


def test_the_open_probability_of_the_paper() -> None:
    logits = torch.tensor([2.0], requires_grad=True)
    probability = open_probability(logits, BETA)
    assert float(probability.detach()) == pytest.approx(1 / (1 + math.exp(-(2 + 0.333 * math.log(11)))), abs=1e-6)
    assert float(probability.detach()) == pytest.approx(0.94, abs=0.005)
    probability.backward()
    assert logits.grad is not None and float(logits.grad) > 0


def test_binary_gates_have_the_gradient_of_soft_ones() -> None:
    logits = torch.tensor([-0.4, 0.1, 0.3, 6.0], dtype=torch.float64, requires_grad=True)
    noise = torch.tensor([0.5, 0.45, 0.6, 0.9], dtype=torch.float64)
    gates = binarize(hard_concrete(logits, noise, BETA))
    assert gates.detach().round(decimals=12).tolist() == [0.0, 0.0, 1.0, 1.0]
    gates.sum().backward()
    step = 1e-6
    slope = (hard_concrete(logits + step, noise, BETA) - hard_concrete(logits - step, noise, BETA)) / (2 * step)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, slope.detach(), atol=1e-6, rtol=1e-5)
    assert logits.grad[-1] == 0, "a saturated gate"


def test_outputs_are_scaled_by_the_share_of_open_heads() -> None:
    assert float(output_scale(torch.tensor([1.0, 0.0, 0.0, 1.0]))) == 2
    assert float(output_scale(torch.ones(3))) == 1
    assert float(output_scale(torch.zeros(5))) == 5, "without an open head nothing is divided by zero"
    gates = HardConcreteGates(4, HeadGates(coefficient=0.02, initial_logit=-1.0, scale_output=True))
    assert gates.eval()().tolist() == [0, 0, 0, 0]
    gates.decide(np.array([0]))
    assert gates().tolist() == [4, 0, 0, 0], "a decision goes before the logits"
    assert gates.train()().tolist() == [4, 0, 0, 0], "nor is there noise any more"
    gates = HardConcreteGates(2, HeadGates(coefficient=0.02, initial_logit=0.0, scale_output=True))
    assert gates.eval()().tolist() == [1, 1], "evaluation opens a gate from 0 on"


def test_gates_in_training_are_random_and_binary() -> None:
    torch.manual_seed(0)
    gates = HardConcreteGates(4000, HeadGates(coefficient=0.02, scale_output=False, initial_logit=1.0)).train()
    values = gates().detach().round(decimals=6)
    assert set(values.tolist()) == {0.0, 1.0}
    assert float(values.mean()) == pytest.approx(1 / (1 + math.exp(-1)), abs=0.02)
    assert not values.equal(gates().detach().round(decimals=6))


@torch.no_grad()
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("scale", [False, True])
def test_removal_equals_gates_of_zero(name: str, scale: bool) -> None:
    network = BUILDS[name]()
    anatomy, batch, generator = anatomy_of(network), inputs(name), np.random.Generator(np.random.PCG64(0))
    parts, method = gated_parts(anatomy), HeadGates(coefficient=0.02, scale_output=scale)
    gates = [method.make_gates(part).eval() for part in parts]
    choice: dict[str, np.ndarray] = {}
    for part, gate in zip(parts, gates, strict=True):
        kept = generator.permutation(part.units)[: max(part.units // 2, 1)]
        gate.decide(kept)
        choice[part.name] = np.sort(kept)
    before = network(**batch).logits
    with gated(parts, gates):
        wanted = network(**batch).logits
    assert not torch.allclose(wanted, before, atol=1e-4)
    torch.testing.assert_close(network(**batch).logits, before)  # the gates are gone outside
    for part, gate in zip(parts, gates, strict=True):
        scale_units(part, gate())
    cut(network, [choice.get(part.name, np.arange(part.units)) for part in anatomy.parts])
    torch.testing.assert_close(network(**batch).logits, wanted, atol=1e-5, rtol=1e-4)


def student_with_gates(**settings: Any) -> tuple[GatedStudent, HeadGates, list[HardConcreteGates]]:
    method = HeadGates(**settings)
    network = BUILDS["llama"]()
    gates = [HardConcreteGates(2, method) for _ in range(3)]
    return GatedStudent(network, method, None, gates, [1.0, 1.0, 2.0]).train(), method, gates


def test_the_penalty_counts_expected_heads_and_warms_up() -> None:
    student, _, gates = student_with_gates(coefficient=0.02, penalty_warmup=0.1)
    expected = 6 * float(open_probability(torch.tensor(2.0), BETA))
    for step, share in ((0, 0.0), (5, 0.5), (10, 1.0), (70, 1.0)):
        student.start_step(None, step, 100)
        assert float(student.penalty().detach()) == pytest.approx(share * 0.02 * expected, rel=1e-5)
    at_once, _, _ = student_with_gates(coefficient=0.02, penalty_warmup=0.0)
    at_once.start_step(None, 0, 100)
    assert float(at_once.penalty().detach()) == pytest.approx(0.02 * expected, rel=1e-5)
    student.penalty().backward()
    assert all(float(gate.logits.grad.min()) > 0 for gate in gates if gate.logits.grad is not None)
    assert gates[0].logits.grad is not None


def test_the_coefficient_follows_the_budget() -> None:
    """It grows while more is open than allowed, weighed by cost, and shrinks otherwise."""
    student, _, gates = student_with_gates(budget=Budget("heads", 0.5), penalty_warmup=0.1)
    student.start_step(0.5, 0, 100)
    assert float(student.penalty_state) < 1e-3, "at the start all heads are allowed, and some are closed by chance"
    before = float(student.penalty_state)
    for step in range(50, 60):
        student.start_step(0.5, step, 100)
    assert float(student.penalty_state) == pytest.approx(
        before * math.exp(10 * 10 / 100 * (float(open_probability(torch.tensor(2.0), BETA)) - 0.5) / 0.5), rel=1e-4
    )
    with torch.no_grad():
        gates[2].logits.fill_(-20.0)  # half of the cost
    high = float(student.penalty_state)
    student.start_step(0.5, 60, 100)
    assert float(student.penalty_state) < high
    assert "penalty_state" in student.state_dict()


@pytest.mark.parametrize("settings", [{}, {"initial_logit": 1.0, "scale_output": False}])
def test_useless_heads_are_the_ones_that_leave(settings: dict[str, Any], tmp_path: Path) -> None:
    """Of each layer of the trained model one of two KV groups adds nothing; the weights are too slow to change that."""
    model = character_model()
    for part, useless in zip(gated_parts(model.anatomy), (0, 1, 0), strict=True):
        with torch.no_grad():
            columns = slice(useless * part.columns_per_unit, (useless + 1) * part.columns_per_unit)
            part.output.weight[:, columns] = 0
    facts = apply(
        model, character_batches(), tmp_path, budget="heads=0.5", optimizer={"lr": 1e-7}, min_heads=0, epochs=20,
        **{"scale_output": False, **settings},
    )  # fmt: skip
    assert [part.kept for part in gated_parts(model.anatomy)] == [(1,), (0,), (1,)]
    assert facts["heads_per_layer"] == [1, 1, 1] and facts["heads_kept"] == 0.5
    assert facts["removal_error"] < 1e-5


def test_a_larger_coefficient_closes_more(tmp_path: Path) -> None:
    kept = []
    for number, coefficient in enumerate((0.001, 0.05, 5.0)):
        model = character_model()
        try:
            apply(model, character_batches(), tmp_path / str(number), coefficient=coefficient, epochs=12)
        except BudgetError as error:
            assert "all gates stayed open" in str(error)
        kept.append(sum(part.units for part in gated_parts(model.anatomy)))
    assert kept == sorted(kept, reverse=True) and kept[0] > kept[-1]
    assert kept[-1] == 3, "one head of each layer has to stay"


@pytest.mark.parametrize("name", ["bert", "all-attention"])
def test_a_layer_may_lose_all_heads_if_that_is_allowed(name: str, tmp_path: Path) -> None:
    model = Model(BUILDS[name]())
    facts = apply(model, batches(name), tmp_path / "run", coefficient=50.0, min_heads=0, epochs=20, gate_lr=0.2)
    assert facts["heads_per_layer"] == [0, 0, 0] and facts["heads_kept"] == 0
    logits = model.network(**inputs(name)).logits
    assert bool(logits.isfinite().all())
    (tmp_path / "out").mkdir()
    save_artifact(model, tmp_path / "out")
    assert load(tmp_path / "out").network(**inputs(name)).logits.equal(logits)


@pytest.mark.parametrize("name", ["bert", "llama", "all-attention"])
@pytest.mark.parametrize("measure", ["heads", "parameters"])
def test_the_budget_is_met(name: str, measure: str, tmp_path: Path) -> None:
    model = Model(BUILDS[name]())
    before, heads = block_parameters(model.anatomy), sum(part.units for part in gated_parts(model.anatomy))
    keep = 0.5 if measure == "heads" or name == "all-attention" else 0.9
    facts = apply(model, batches(name, 3), tmp_path, budget={measure: keep}, epochs=1)
    after, left = block_parameters(model.anatomy), sum(part.units for part in gated_parts(model.anatomy))
    assert facts["parameters_removed"] == before - after > 0
    if measure == "heads":
        assert left == heads / 2
    else:
        unit = before * 0.2  # more than one head of any of them
        assert keep * before - unit < after <= keep * before
    assert min(facts["heads_per_layer"]) >= 1


def test_heads_stay_in_multiples(tmp_path: Path) -> None:
    model = Model(BUILDS["all-attention"]())
    facts = apply(model, batches("all-attention", 3), tmp_path, budget="heads=0.7", head_multiple=2, epochs=1)
    assert all(count % 2 == 0 for count in facts["heads_per_layer"]) and sum(facts["heads_per_layer"]) == 8
    anatomy = anatomy_of(BUILDS["all-attention"]())
    method = HeadGates(coefficient=0.02, head_multiple=2, min_heads=1)
    gates = [HardConcreteGates(4, method) for _ in range(3)]
    for gate, logits in zip(gates, ([1.0, -1, 2, 3], [-1.0, -2, -3, -4], [1.0, 1, 1, 1]), strict=True):
        gate.logits.data = torch.tensor(logits)
    choice: KeptUnits = method.choose(anatomy, gates)
    assert [kept.tolist() for kept in choice] == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]
    choice = HeadGates(coefficient=0.02).choose(anatomy, gates)
    assert [kept.tolist() for kept in choice] == [[0, 2, 3], [0], [0, 1, 2, 3]]


def test_gates_learn_at_a_rate_of_their_own(tmp_path: Path) -> None:
    """With a learning rate near zero the weights stay, and gates move by about their own rate per step."""
    model = Model(BUILDS["llama"]())
    weight = model.network.get_submodule("model.layers.0.mlp.up_proj").weight.detach().clone()
    facts = apply(
        model, batches("llama"), tmp_path, coefficient=1000.0, epochs=2, gate_lr=0.05, optimizer={"lr": 1e-9},
        penalty_warmup=0.0, min_heads=1, initial_logit=0.3, gate_training=1.0,
    )  # fmt: skip
    torch.testing.assert_close(model.network.get_submodule("model.layers.0.mlp.up_proj").weight.detach(), weight)
    for logits in facts["gate_logits"]:
        assert np.mean(logits) == pytest.approx(0.3 - 0.05 * facts["steps"], abs=0.03)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_gates_are_fixed_after_their_part_of_the_training(fraction: float, tmp_path: Path) -> None:
    """All logits fall from 0.3 by 0.05 per step of 8: below 0 at the end, but not yet after half of the steps."""
    settings: dict[str, Any] = {
        "coefficient": 1000.0, "epochs": 2, "gate_lr": 0.05, "optimizer": {"lr": 1e-9}, "penalty_warmup": 0.0,
        "initial_logit": 0.3, "gate_training": fraction,
    }  # fmt: skip
    if fraction == 1:
        assert set(apply(Model(BUILDS["llama"]()), batches("llama"), tmp_path, **settings)["heads_per_layer"]) == {1}
        return
    with pytest.raises(BudgetError, match="removed nothing, as all gates stayed open"):
        apply(Model(BUILDS["llama"]()), batches("llama"), tmp_path, **settings)


def test_after_the_decision_the_penalty_is_zero_and_logits_decide_nothing() -> None:
    method, anatomy = HeadGates(budget=Budget("heads", 0.5)), anatomy_of(BUILDS["llama"]())
    parts = gated_parts(anatomy)
    gates = [method.make_gates(part) for part in parts]
    student = GatedStudent(anatomy.network, method, None, gates, [1.0 for _ in gates]).train()
    student.start_step(0.5, 0, 10)
    assert float(student.penalty().detach()) > 0 and not gates[0].decided
    method.decide(anatomy, gates, [np.array([part.units - 1]) for part in anatomy.parts])
    student.start_step(0.5, 10, 10)
    assert float(student.penalty().detach()) == 0
    with torch.no_grad():
        for gate in gates:
            gate.logits[0] += 5
    kept = dict(zip((part.name for part in anatomy.parts), method.choose(anatomy, gates), strict=True))
    assert all(kept[part.name].tolist() == [part.units - 1] for part in parts)
    assert student.log_values()["open_gates"] == pytest.approx(len(parts) / sum(part.units for part in parts))


def test_a_teacher_replaces_the_labels(tmp_path: Path) -> None:
    model = character_model()
    facts = apply(
        model, character_batches(), tmp_path, budget="heads=0.7", teacher="source", losses=[{"loss": "logits"}]
    )
    assert facts["loss_curve"][0][1] < 0.5, "the divergence from the teacher, not the loss on the text"


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])  # resumed after, at and before the decision
def test_an_interrupted_training_ends_with_the_same_weights(
    fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"budget": "heads=0.5", "checkpoint_every": 2, "epochs": 2, "gate_training": fraction}
    step = METHODS.build({"method": "head-gates", "batch_size": 6, "optimizer": {"lr": 1e-3}, **settings})
    data = batches("llama")
    source = Model(BUILDS["llama"]())
    models = [Model(copy.deepcopy(source.network)) for _ in range(2)]
    wanted = step.apply(models[0], MethodContext(batches=data, checkpoint=Checkpoint(tmp_path / "whole")))
    original, calls = Trainer.train_step, [0]

    def stopped(self: Trainer) -> dict[str, Any]:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(Trainer, "train_step", stopped)
    interrupted = MethodContext(batches=data, checkpoint=Checkpoint(tmp_path / "cut"))
    with pytest.raises(KeyboardInterrupt):
        step.apply(Model(copy.deepcopy(source.network)), interrupted)
    facts = step.apply(models[1], interrupted)
    assert calls[0] > 6 and calls[0] < 2 * wanted["steps"], "the steps before the checkpoint are not repeated"
    assert facts["gate_logits"] == wanted["gate_logits"] and facts["heads_per_layer"] == wanted["heads_per_layer"]
    states = [model.network.state_dict() for model in models]
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"budget": "heads=0"}, "fraction above 0"),
        ({"budget": "heads=1.0"}, "would remove nothing"),
        ({"budget": "macs=0.5"}, "budget of heads or parameters"),
        ({}, "either a budget"),
        ({"budget": "heads=0.5", "coefficient": 0.02}, "either a budget"),
        ({"coefficient": 0.0}, "coefficient of head-gates must be above 0"),
        ({"coefficient": 0.02, "min_heads": -1}, "min_heads of head-gates"),
        ({"coefficient": 0.02, "beta": 0.0}, "beta of head-gates"),
        ({"coefficient": 0.02, "penalty_warmup": 2.0}, "penalty_warmup of head-gates"),
        ({"coefficient": 0.02, "gate_lr": 0.0}, "gate_lr of head-gates"),
        ({"coefficient": 0.02, "gate_training": 0.0}, "gate_training of head-gates"),
        ({"coefficient": 0.02, "losses": []}, "at least one term"),
        ({"coefficient": 0.02, "losses": [{"loss": "logits"}]}, "needs a teacher"),
        ({"coefficient": 0.02, "losses": [{"loss": "hidden-states"}], "teacher": "source"}, "logits only"),
        ({"coefficient": 0.02, "teacher": "other"}, "give `teacher: source`"),
    ],
)
def test_settings_that_cannot_work(step: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        METHODS.build({"method": "head-gates", **step})


def test_defaults_are_those_of_the_paper() -> None:
    method = HeadGates(coefficient=0.02)
    assert (method.beta, method.initial_logit, method.penalty_warmup, method.epochs) == (0.333, 2.0, 1 / 20, 20.0)
    assert (method.optimizer.lr, method.schedule.name, method.max_grad_norm) == (1e-4, "constant", 0.5)
    assert HeadGates(coefficient=0.02, beta=0.01).beta == 0.01
    assert HeadGates(coefficient=0.02, min_heads=0).min_heads == 0


def test_the_plan_counts_states_copies_and_what_leaves() -> None:
    anatomy, size = anatomy_of(BUILDS["llama"]()), CalibrationSize(samples=8, seq_len=11, batch_size=4)
    weights = 4 * sum(parameter.numel() for parameter in anatomy.network.parameters())
    plain = HeadGates(coefficient=0.02, epochs=2).estimate_resources(anatomy, size, None)
    sgd = HeadGates(coefficient=0.02, epochs=2, optimizer=OptimizerConfig(name="sgd"))
    taught = HeadGates(coefficient=0.02, epochs=2, teacher="source")
    assert plain.memory - sgd.estimate_resources(anatomy, size, None).memory == weights
    assert taught.estimate_resources(anatomy, size, None).memory - plain.memory == weights
    assert (plain.passes, taught.estimate_resources(anatomy, size, None).passes) == (6, 8)
    unit = unit_parameters(gated_parts(anatomy)[0])
    for keep, removed in ((0.5, 3), (0.4, 4)):  # of six KV groups
        method = HeadGates(budget=Budget("heads", keep))
        assert method.added_parameters(anatomy) == -removed * unit
    assert HeadGates(coefficient=0.02).added_parameters(anatomy) == 0


def test_other_methods_refuse_a_budget_of_heads() -> None:
    for name in ("fisher", "magnitude", "slicegpt", "shortgpt", "reap", "ltp"):
        with pytest.raises(RecipeError, match="budget of"):
            METHODS.build({"method": name, "budget": "heads=0.5"})


def test_networks_and_data_that_cannot_work(tmp_path: Path) -> None:
    step = METHODS.build({"method": "head-gates", "budget": "heads=0.5"})
    with pytest.raises(ModelError, match="needs attention heads that can be removed, and this resnet network has none"):
        step.check(anatomy_of(BUILDS["resnet"]()))
    tight = METHODS.build({"method": "head-gates", "budget": "heads=0.2"})
    with pytest.raises(BudgetError, match=r"heads=0.2: 25 % remain if .* or lower `min_heads`"):
        tight.check(anatomy_of(BUILDS["all-attention"]()))
    METHODS.build({"method": "head-gates", "budget": "heads=0.25"}).check(anatomy_of(BUILDS["all-attention"]()))
    with pytest.raises(BudgetError, match=r"parameters=0.3: .* % remain if every layer keeps as few heads"):
        METHODS.build({"method": "head-gates", "budget": "parameters=0.3"}).check(anatomy_of(BUILDS["llama"]()))
    quantized = Model(BUILDS["llama"]())
    METHODS.build("rtn", bits=8, group_size=-1).apply(quantized, MethodContext())
    with pytest.raises(ModelError, match="already quantized"):
        step.check(quantized.anatomy)
    with pytest.raises(DataError, match="trains on labels"):
        step.apply(Model(BUILDS["llama"]()), MethodContext(batches=[inputs("llama")], folder=tmp_path))


def test_a_later_step_is_checked_on_undecided_widths() -> None:
    network = BUILDS["all-attention"]()
    step = METHODS.build({"method": "head-gates", "budget": "heads=0.5", "head_multiple": 2})
    widths = step.reshape(anatomy_of(network), {})
    assert {(width.multiple, width.largest, width.setting) for width in widths.values()} == {(16, 32, "head_multiple")}
    assert [part.units for part in anatomy_of(network).parts] == [2, 2, 2]
    kept = BUILDS["all-attention"]()
    keep_units(kept, anatomy_of(kept).parts[0], [1])
    assert len(METHODS.build({"method": "head-gates", "budget": "heads=0.9"}).reshape(anatomy_of(kept), {})) == 2
