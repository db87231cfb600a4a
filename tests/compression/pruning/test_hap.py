"""HAP: its formula and ranking, budgets with implants, and implants that add nothing at first and then learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import smelt.compression.pruning
import smelt.compression.quantization  # noqa: F401
from smelt.compression.base import METHODS, Choices, MethodContext
from smelt.compression.budget import Budget
from smelt.compression.calibration.gradients import batch_loss
from smelt.compression.calibration.hessian import UnitTraces, hessian_traces
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.pruning.hap import Hap, _ImplantCosts
from smelt.compression.pruning.repair import cut
from smelt.compression.pruning.selection import parse_ranges
from smelt.errors import BudgetError, DataError, ModelError, RecipeError
from smelt.measure.cost import Workload, block_cost, cost_with_units, unit_parameters
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.implants import implants_of
from smelt.models.model import Model
from tests.tiny import BUILDS, build_network, inputs, labeled

IMPLANTED = ("resnet", "resnet-bottleneck", "bert", "distilbert", "vit")
WORKLOAD = Workload(tokens=11, image_size=32)


def build(name: str) -> Model:
    model = Model(BUILDS[name]())
    model.network.config.image_size = 32
    return model


def pruned(name: str, context: MethodContext | None = None, **settings: Any) -> tuple[Model, dict[str, Any]]:
    model = build(name)
    context = context or MethodContext(batches=[labeled(name, seed) for seed in range(2)])
    step = {"method": "hap", "probes": 4, "seq_len": 11, "budget": {"parameters": 0.6}, **settings}
    return model, METHODS.build(step).apply(model, context)


@pytest.mark.parametrize("measure", ["parameters", "macs", "bytes"])
@pytest.mark.parametrize("implant", [0.0, 0.4])
@pytest.mark.parametrize("name", [*IMPLANTED, "llama", "gpt2"])
def test_the_budget_is_met_with_the_implants(name: str, implant: float, measure: Any) -> None:
    if implant and name not in IMPLANTED:
        return
    full = block_cost(build(name).anatomy, measure, WORKLOAD)
    model, facts = pruned(name, budget={measure: 0.6}, implant=implant)
    share = block_cost(model.anatomy, measure, WORKLOAD) / full
    assert (0.5 if name in IMPLANTED else 0.45) < share <= 0.6  # one KV head of these decoders is a tenth of the bytes
    assert (facts.get("implanted_units", 0) > 3) == bool(implant) == bool(implants_of(model.anatomy))
    for part in model.anatomy.parts:
        assert part.units >= np.ceil(0.05 * part.original_units) and len(part.kept) == part.units


@pytest.mark.parametrize("measure", ["parameters", "macs", "bytes"])
@pytest.mark.parametrize("name", ["resnet", "resnet-bottleneck", "bert"])
def test_the_cost_of_implants_is_known_before_they_exist(name: str, measure: Any) -> None:
    model, generator = build(name), np.random.default_rng(0)
    method = Hap(Budget(measure, 0.6), implant=0.5, seq_len=11)
    scores = [generator.random(part.units) for part in model.anatomy.parts]
    choice = method.select_units(model.anatomy, scores, MethodContext(), method.budget)
    added = _ImplantCosts(model.anatomy, measure, WORKLOAD).added(
        choice, method.implant_sizes(model.anatomy, scores, choice)
    )
    kept = cost_with_units(model.anatomy, [len(units) for units in choice], measure, WORKLOAD)
    method._cut_and_implant(model, choice, method.bands(model.anatomy, scores, choice))
    assert block_cost(model.anatomy, measure, WORKLOAD) == pytest.approx(kept + added) and added > 0


@pytest.mark.parametrize("name", IMPLANTED)
def test_an_implant_adds_nothing_at_first(name: str) -> None:
    choices = Choices()
    batches = [labeled(name, seed) for seed in range(2)]
    model, _ = pruned(name, MethodContext(batches=batches, choices=choices), implant=0.5)
    without = build(name)
    kept = [parse_ranges(text, part) for text, part in zip(choices.made["choice"], without.anatomy.parts, strict=True)]
    cut(without.network, kept)
    with torch.no_grad():
        expected, logits = (each.network(**inputs(name)).logits for each in (without, model))
    assert torch.allclose(logits, expected, atol=1e-5) and implants_of(model.anatomy)


@pytest.mark.parametrize("name", IMPLANTED)
def test_an_implant_learns(name: str, tmp_path: Path) -> None:
    """Its zeros get a gradient at once, what they multiply in the next step; the result is saved and loaded."""
    model, _ = pruned(name, implant=0.5)
    network, batch = model.network.requires_grad_(True), labeled(name)
    network.train("resnet" in name)  # the norms then have the statistics of the new channels
    first, second = _gradients(model, batch), None
    with torch.no_grad():
        for parameter in network.parameters():
            parameter -= 0.1 * (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    second = _gradients(model, batch)
    assert all(float(zeros.abs().sum()) > 0 for zeros, _ in first)
    assert all(float(others.abs().sum()) == 0 for _, others in first)
    assert sum(float(others.abs().sum()) > 0 for _, others in second) > 0.7 * len(second)  # a channel may be below zero
    network.eval()
    save_artifact(model, tmp_path)
    loaded = load_artifact(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded.network(**inputs(name)).logits, network(**inputs(name)).logits)
    assert implants_of(loaded.anatomy) == implants_of(model.anatomy)


def _gradients(model: Model, batch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the gradients of what reads each implant, and of the implant."""
    model.network.zero_grad()
    batch_loss(model.network, batch).backward()
    pairs: list[Any] = []
    for part in (part for part in model.anatomy.parts if part.implant is not None):
        if part.kind == "channels":
            convolution = part.implant.implant
            columns = part.output.module.weight.grad[:, -convolution.out_channels :]
            pairs.append((columns, convolution.weight.grad))
        else:
            pairs.append((part.implant.up.weight.grad, part.implant.down.weight.grad))
    return pairs


def test_what_an_implant_begins_as() -> None:
    """A 1x1 kernel: the center of the one it replaces. A low-rank product: the main directions of the lost product."""
    dense = build("resnet")
    choices = Choices()
    context = MethodContext(batches=[labeled("resnet")], choices=choices)
    model, _ = pruned("resnet", context, implant=0.5)
    for part, before in zip(model.anatomy.parts, dense.anatomy.parts, strict=True):
        if part.implant is not None:
            kernels = before.input_projections[0].weight[list(part.kept)]
            count = part.implant.implant.out_channels
            assert torch.equal(part.implant.implant.weight[..., 0, 0], kernels[-count:, :, 1, 1])
            assert torch.equal(part.implant.kept.weight, kernels[:-count])
    dense = build("bert")
    model, _ = pruned("bert", implant=1.0, implant_rank=1.0, max_sparsity=None)
    for part, before in zip(model.anatomy.parts, dense.anatomy.parts, strict=True):
        if part.implant is None:
            continue
        lost = np.setdiff1d(range(before.units), part.kept)
        width = before.columns_per_unit
        places = torch.from_numpy((lost[:, None] * width + np.arange(width)).flatten())
        first = before.values if before.kind == "heads" else before.input_projections[0]
        assert first is not None
        product = before.output.weight[:, places] @ first.weight[places]
        down = part.implant.down.weight
        assert len(down) == min(len(places), 32)
        assert torch.allclose(down @ down.T, torch.eye(len(down)), atol=1e-5)
        assert torch.allclose(product @ down.T @ down, product, atol=1e-4)  # of full rank: nothing is lost


def test_the_ranking_is_global_and_the_band_is_its_upper_end() -> None:
    model, batches = build("resnet"), [labeled("resnet", seed) for seed in range(2)]
    settings = {"budget": {"parameters": 0.7}, "implant": 0.3, "max_sparsity": 0.6, "alignment": 1}
    method, context = Hap.from_config({"method": "hap", **settings}), MethodContext(batches=batches)
    assert isinstance(method, Hap)
    anatomy = model.anatomy
    scores = method.scores(anatomy, hessian_traces(anatomy, batches, 3, seed=0), context)
    choice = method.select_units(anatomy, scores, context, method.budget)
    bands = method.bands(anatomy, scores, choice)
    removed, band = [], []
    for part, score, kept, implanted in zip(anatomy.parts, scores, choice, bands, strict=True):
        out = np.setdiff1d(range(part.units), kept)
        assert len(kept) >= 0.4 * part.units - 1e-9
        removed += score[out].tolist()
        band += score[implanted].tolist()
        assert set(implanted) <= set(out)
    assert sorted(band) == sorted(removed)[-round(0.3 * len(removed)) :]
    for part, score, kept in zip(anatomy.parts, scores, choice, strict=True):
        if len(kept) > np.ceil(0.4 * part.units):  # not held by the limit: only the threshold decides
            assert set(np.flatnonzero(score > max(removed))) <= set(kept)
            assert score[kept].min() >= max(score[np.setdiff1d(range(part.units), kept)], default=-np.inf)


def test_scores_follow_the_formula() -> None:
    traces = UnitTraces(
        np.array([[[1.0, -2.0], [3.0, 4.0]], [[3.0, 0.0], [5.0, 0.0]]]), np.array([[2.0, 1.0], [1.0, 3.0]]),
        np.array([4.0, 5.0]),
    )  # fmt: skip
    context, anatomy = MethodContext(), build("resnet").anatomy
    traces_of_parts = [traces] * len(anatomy.parts)

    def scores(**settings: str) -> list[np.ndarray]:
        method = Hap.from_config({"method": "hap", "budget": {"macs": 0.5}, **settings})
        assert isinstance(method, Hap)
        return method.scores(anatomy, traces_of_parts, context)

    # Traces 2 and -1 of rows, 4 and 2 of columns, times the squared norm, divided by twice the size.
    assert scores(ranking="unit")[0] == pytest.approx([2 * 2 / 8 + 4 / 10, -1 / 8 + 2 * 3 / 10])
    assert scores(ranking="unit", weights="rows")[0] == pytest.approx([2 * 2 / 8, -1 / 8])
    for part, per_unit, per_parameter in zip(anatomy.parts, scores(ranking="unit"), scores(), strict=True):
        assert per_parameter * unit_parameters(part) == pytest.approx(per_unit)


def test_less_loss_than_magnitude_and_random_on_a_trained_network() -> None:
    network, batches = trained_resnet()
    increases: dict[str, list[float]] = {}
    for settings in ({"method": "hap", "probes": 16}, {"method": "magnitude"}, {"method": "random"}):
        for seed in range(3):
            model = Model(build_small())
            model.network.load_state_dict(network.state_dict())
            METHODS.build({**settings, "budget": {"parameters": 0.5}}).apply(
                model, MethodContext(batches=batches[:2], seed=seed)
            )
            with torch.no_grad():
                losses = [float(batch_loss(model.network, batch)) for batch in batches]
            increases.setdefault(str(settings["method"]), []).append(float(np.mean(losses)))
    means = {name: np.mean(values) for name, values in increases.items()}
    assert means["hap"] < 0.8 * means["magnitude"] and means["hap"] < 0.8 * means["random"], means


def build_small() -> Any:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4, num_channels=1,
        image_size=16,
    )  # fmt: skip
    network: Any = build_network(hf.ResNetForImageClassification, config)
    network.resnet.embedder.pooler = nn.Identity()
    return network


def trained_resnet() -> tuple[Any, list[dict[str, Tensor]]]:
    """Train to tell waves of four directions in noise."""
    torch.manual_seed(0)
    network, (rows, columns) = build_small(), torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    waves = torch.stack([torch.sin(rows), torch.sin(columns), torch.sin(rows + columns), torch.sin(rows - columns)])
    batches = []
    for _ in range(12):
        labels = torch.randint(0, 4, (32,))
        images = waves[labels] * torch.rand(32, 1, 1).add(0.3) + 0.8 * torch.randn(32, 16, 16)
        batches.append({"pixel_values": images[:, None], "labels": labels})
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    network.train()
    for step in range(72):
        optimizer.zero_grad()
        batch_loss(network, batches[step % len(batches)]).backward()
        optimizer.step()
    return network.eval(), batches


def test_an_interrupted_run_repeats_its_choice(tmp_path: Path) -> None:
    batches = [labeled("bert", seed) for seed in range(2)]
    whole, _ = pruned("bert", MethodContext(batches=batches), implant=0.3)
    checkpoint = Checkpoint(tmp_path)
    pruned("bert", MethodContext(batches=batches, checkpoint=checkpoint), implant=0.3)
    resumed, _ = pruned("bert", MethodContext(batches=batches, checkpoint=checkpoint), implant=0.3)
    one, two = whole.network.state_dict(), resumed.network.state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"implant": 1.5}, "implant of hap must lie between 0 and 1"),
        ({"implant": -0.1}, "implant of hap must lie between 0 and 1"),
        ({"implant_rank": 0}, "implant_rank of hap must lie between"),
        ({"probes": 0}, "probes of hap must lie between"),
        ({"ranking": "layer"}, "ranking of hap must be one of unit, parameter"),
        ({"weights": "columns"}, "weights of hap must be one of blocks, rows"),
        ({"implant": 0.1, "repair": "full"}, "trained after pruning, not fitted"),
        ({"implant": 0.1, "widths": "uniform"}, "do not know the implants"),
        ({"budget": {"latency": 0.5}}, "cannot search under a latency budget"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        METHODS.build({"method": "hap", "budget": {"parameters": 0.5}, **settings})


def test_the_plan_knows_the_implants() -> None:
    """A later step that cannot keep them is refused before any work, one that can is not."""
    settings = {"method": "hap", "budget": {"parameters": 0.5}}
    rtn = METHODS.build({"method": "rtn", "bits": 8, "group_size": -1})
    for name, implant in (("resnet-bottleneck", 0.1), ("resnet-bottleneck", 0.0), ("bert", 0.1)):
        with torch.device("meta"):
            network = type(BUILDS[name]())(BUILDS[name]().config)
        METHODS.build({**settings, "implant": implant}).reshape(anatomy_of(network), {})
        assert bool(implants_of(anatomy_of(network))) == bool(implant)
        if name != "bert" and implant:
            with pytest.raises(ModelError, match="cannot be quantized"):
                rtn.check(anatomy_of(network))
        else:
            rtn.check(anatomy_of(network))


def test_what_cannot_be_pruned() -> None:
    with pytest.raises(ModelError, match=r"can put no implant into this network.*decoders"):
        pruned("llama", implant=0.1)
    with pytest.raises(BudgetError, match="cannot be met"):
        pruned("resnet", budget={"parameters": 0.01})
    with pytest.raises(BudgetError, match="cannot be met"):
        pruned("bert", budget={"parameters": 0.03}, implant=0.5)
    with pytest.raises(DataError, match="needs labels"):
        pruned("bert", MethodContext(batches=[inputs("bert")]))
    model, _ = pruned("resnet", implant=0.9, implant_rank=1)
    with pytest.raises(ModelError, match="has a neural implant, and no more channels"):
        METHODS.build({"method": "magnitude", "budget": {"parameters": 0.9}}).apply(model, MethodContext())
