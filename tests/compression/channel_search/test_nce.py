"""NCE: interpolation, expected costs, draws and expansion against their formulas; budgets, resuming, bad input."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compression.base import METHODS, Batch, CalibrationSize, MethodContext
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.channel_search.base import ChannelSearchRun
from smelt.compression.channel_search.nce import Nce
from smelt.compression.channel_search.supernet import SearchedConvolution, SearchedNorm, interpolate_channels
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.distillation.fake_quantize import fake_quantized_layers, init_activations, prepare
from smelt.compression.distillation.quantizers.sawb import Sawb
from smelt.compression.methods import channel_search  # noqa: F401  (puts the method on the list)
from smelt.compression.recipe.recipe import Recipe
from smelt.compression.recipe.step_checks import check_steps
from smelt.errors import BudgetError, DataError, DivergenceError, ModelError, RecipeError
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.surgery import keep_units, widen_channels
from tests.compression.distillation.test_qat import W2A2, Interrupted, accuracy, images
from tests.tiny import BUILDS, inputs, labeled

RESNETS = ("resnet", "resnet-bottleneck")
FAST = {
    "budget": {"macs": 1.0}, "batch_size": 16, "epochs": 4, "width_lr": 0.05, "augment": False,
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}, **W2A2,
}  # fmt: skip


def build(**settings: Any) -> Nce:
    method = METHODS.build("nce", **{**FAST, **settings})
    assert isinstance(method, Nce)
    return method


def search(
    folder: Path | None = None, batches: list[Batch] | None = None, progress: Any = None, **settings: Any
) -> tuple[Model, dict[str, Any]]:
    model = Model(BUILDS[settings.pop("network", "resnet")](), source="tiny")
    more = {} if progress is None else {"progress": progress}
    context = MethodContext(batches=batches or images(64), seed=1, checkpoint=Checkpoint(folder), **more)
    return model, build(**settings).apply(model, context)


def prepared(network: str = "resnet", **settings: Any) -> ChannelSearchRun:
    """Return a search that is ready to train."""
    context = MethodContext(batches=images(64), seed=1)
    run = ChannelSearchRun(build(**settings), Model(BUILDS[network](), source="tiny"), context)
    run._prepare()
    return run


def set_probabilities(run: ChannelSearchRun, position: int, logit: float) -> None:
    with torch.no_grad():
        for choice in run.choices:
            choice.logits.zero_()
            choice.logits[: choice.count][position] = logit


# --- channel-wise interpolation ---


@pytest.mark.parametrize(("channels", "wanted"), [(5, 8), (8, 5), (1, 7), (7, 1), (6, 12), (12, 6), (16, 28)])
def test_interpolation_is_adaptive_average_pooling_of_channels(channels: int, wanted: int) -> None:
    x = torch.randn(3, channels, 4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    result = interpolate_channels(x, wanted)
    expected = F.adaptive_avg_pool1d(x.flatten(2).transpose(1, 2), wanted).transpose(1, 2).view(3, wanted, 4, 5)
    assert torch.allclose(result, expected, atol=1e-6)
    assert torch.allclose(interpolate_channels(torch.ones_like(x), wanted), torch.ones(3, wanted, 4, 5))
    if max(channels, wanted) % min(channels, wanted) == 0:  # all windows have one size, so that the mean stays
        assert torch.allclose(result.mean(1), x.mean(1), atol=1e-6)
    probe = torch.randn_like(result)
    gradients = [torch.autograd.grad((y * probe).sum(), x)[0] for y in (result, expected)]
    assert torch.allclose(*gradients, atol=1e-6)


def test_interpolation_to_as_many_channels_is_the_identity() -> None:
    x = torch.randn(2, 6, 3, 3)
    assert interpolate_channels(x, 6) is x


# --- the supernet ---


@pytest.mark.parametrize("network", RESNETS)
@torch.no_grad()
def test_the_supernet_computes_what_the_derived_network_computes(network: str) -> None:
    """At the original widths, narrower ones and wider ones, with quantized weights and inputs."""
    source = BUILDS[network]()
    plain = copy.deepcopy(source)
    layers = [path for path, module in plain.named_modules() if isinstance(module, nn.Conv2d) and "encoder" in path]
    method = build(exclude=["shortcut"])
    prepare(plain, dict.fromkeys([path for path in layers if "shortcut" not in path], method.weights), method.inputs)
    init_activations(plain, {"pixel_values": images(64)[0]["pixel_values"][:16]})
    batch, run = inputs(network), prepared(network, exclude=["shortcut"])
    net = run.model.network.eval()
    assert torch.allclose(net(**batch).logits, plain.eval()(**batch).logits, atol=1e-4), "only the order has changed"
    quantized = {path for path, _ in fake_quantized_layers(net).items()}
    assert quantized == {path for path in layers if "shortcut" not in path}
    for positions in ([0, 7, 3, 9, 2, 11, 5, 8], [15] * 8, [8, 0] * 4):
        positions = [min(p, len(c.candidates) - 1) for p, c in zip(positions, run.choices, strict=False)]
        run.supernet.choose(positions)
        expected = net(**batch).logits
        derived = copy.deepcopy(run)
        widths = derived.derive(positions)
        result: Any = derived.model.network
        assert [part.units for part in anatomy_of(result).parts] == [width for _, width in widths.values()]
        assert not any(isinstance(m, SearchedConvolution | SearchedNorm) for m in result.modules())
        learned = {path: layer.input_learned for path, layer in fake_quantized_layers(net).items()}
        prepare(result, dict.fromkeys(sorted(quantized), method.weights), method.inputs)
        for path, layer in fake_quantized_layers(result).items():
            layer.input_learned = learned[path]
        assert torch.allclose(result(**batch).logits, expected, atol=1e-4)


@torch.no_grad()
def test_a_norm_adds_the_chosen_candidates_by_their_weights() -> None:
    run = prepared()
    choice = run.choices[1]
    norm = next(m for m in run.model.network.modules() if isinstance(m, SearchedNorm) and m.choice is choice)
    norm.eval()
    choice.chosen, choice.weights = (5, 2), torch.tensor([0.3, 0.7])
    wide, narrow = choice.candidates[5], choice.candidates[2]
    x = torch.randn(2, wide, 3, 3)
    first, second = norm.norms[5](x), norm.norms[2](x[:, :narrow])
    assert choice.widest == wide > narrow
    assert torch.allclose(norm(x), 0.3 * first + 0.7 * interpolate_channels(second, wide), atol=1e-6)


def test_channels_are_sorted_by_what_they_contribute() -> None:
    run = prepared()
    run.derive([choice.candidates.index(choice.before) for choice in run.choices])
    source, result = BUILDS["resnet"](), run.model.network
    for before, after in zip(anatomy_of(source).parts, anatomy_of(result).parts, strict=True):
        sums = [
            part.norm.weight.abs() * part.output.weight.transpose(0, 1).flatten(1).norm(dim=1)
            for part in (before, after)
        ]
        assert torch.allclose(sums[1], sums[0].sort(descending=True).values, atol=1e-6)


def test_candidates_are_drawn_by_a_gumbel_softmax() -> None:
    """Against the formula: perturbed logits over the temperature, the set from their softmax, weights within it."""
    run = prepared()
    choice = run.choices[0]
    with torch.no_grad():
        choice.logits.copy_(torch.linspace(-1, 1, len(choice.logits)))
    for temperature in (5.0, 0.1):
        choice.sample(temperature, 2, torch.Generator().manual_seed(3))
        noise = -(-torch.rand(choice.count, generator=torch.Generator().manual_seed(3)).log()).log()
        perturbed = (choice.logits[: choice.count].log_softmax(0) + noise) / temperature
        first, second = choice.chosen
        assert first != second and choice.weights is not None
        assert torch.allclose(choice.weights, torch.stack([perturbed[first], perturbed[second]]).softmax(0), atol=1e-5)
    counts = torch.zeros(choice.count)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        choice.sample(0.1, 1, generator)
        counts[choice.chosen[0]] += 1
    assert torch.allclose(counts / 2000, choice.probabilities.detach(), atol=0.04), "almost an argmax: as probable"


# --- costs ---


def count_by_hand(network: Any, size: int = 32) -> dict[str, float]:
    """Count the MACs of the convolutions in the blocks, and the parameters there, from a real forward pass."""
    counts = {"macs": 0.0, "parameters": float(sum(p.numel() for p in network.resnet.encoder.parameters()))}

    def add(module: Any, args: Any, output: Tensor) -> None:
        counts["macs"] += output[0].numel() * module.weight[0].numel()

    for module in network.resnet.encoder.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(add)
    with torch.no_grad():
        network(pixel_values=torch.zeros(1, 3, size, size))
    return counts


def with_widths(network: str, widths: Sequence[int]) -> Any:
    result = BUILDS[network]()
    for index, width in enumerate(widths):
        part = anatomy_of(result).parts[index]
        if width > part.units:
            widen_channels(part, width)
        else:
            keep_units(result, part, range(width))
    return result


@pytest.mark.parametrize("network", RESNETS)
def test_expected_costs_are_the_mean_over_derived_networks(network: str) -> None:
    run = prepared(network, choices=[0.5, 1.0], max_width=1.25, step=0.25)
    run.choices[0].expand()
    for choice in run.choices[4:]:  # fewer networks to count
        choice.count = 1
    with torch.no_grad():
        for index, choice in enumerate(run.choices):
            choice.logits.copy_(torch.linspace(-0.5, 0.7 - 0.1 * index, len(choice.logits)))
    before, expected = count_by_hand(BUILDS[network]()), dict.fromkeys(("macs", "parameters"), 0.0)
    for positions in itertools.product(*(range(choice.count) for choice in run.choices)):
        pairs = list(zip(run.choices, positions, strict=True))
        probability = math.prod(float(choice.probabilities[position].detach()) for choice, position in pairs)
        counts = count_by_hand(with_widths(network, [choice.candidates[position] for choice, position in pairs]))
        for measure in expected:
            assert run.share(measure, positions) == pytest.approx(counts[measure] / before[measure])
            expected[measure] += probability * counts[measure] / before[measure]
    for measure, value in expected.items():
        assert float(run.expected_share(measure).detach()) == pytest.approx(value, rel=1e-5)


def test_the_penalty_follows_the_most_probable_network() -> None:
    run = prepared(budget={"macs": 0.8}, second_budget={"parameters": 0.9}, cost_weight=3.0)
    loss = torch.tensor(1.5)

    def penalty() -> float:
        return float((run.method.width_loss(run, loss) - loss).detach())

    def log_share(measure: str) -> float:
        return math.log(float(run.expected_share(measure).detach()) / run.method.budgets[measure])

    set_probabilities(run, -1, 2.0)  # all of the widest: both budgets are exceeded
    assert penalty() == pytest.approx(3 * (log_share("macs") + log_share("parameters")), rel=1e-4)
    set_probabilities(run, 0, 2.0)
    assert penalty() == pytest.approx(-3 * (log_share("macs") + log_share("parameters")), rel=1e-4)
    set_probabilities(run, 0, 2.0)
    with torch.no_grad():  # the last part has most parameters, the first most MACs for them
        run.choices[0].logits[run.choices[0].count - 1] = 3.0
        run.choices[1].logits[run.choices[1].count - 1] = 3.0
        run.choices[2].logits[3] = 3.0
    shares = {measure: run.best_share(measure) / keep for measure, keep in run.method.budgets.items()}
    assert 0.95 <= shares["macs"] <= 1 and shares["parameters"] < 0.95
    assert penalty() == 0, "one budget binds, so nothing asks for more of the other"


def test_the_gradient_of_the_widths_equals_finite_differences() -> None:
    """Of the whole loss, through norms, interpolation and penalties, for a fixed draw; in float64, without rounding."""
    run = prepared(inputs=None, budget={"macs": 0.5}, second_budget={"parameters": 0.5})
    run.model.network.double()
    batch = {"pixel_values": images(8)[0]["pixel_values"][:8].double(), "labels": images(8)[0]["labels"][:8]}
    for choice in run.choices:
        choice.logits = choice.logits.detach().double().requires_grad_()

    def loss() -> Tensor:
        run.supernet.sample(1.0, 2, torch.Generator().manual_seed(5))
        return run.method.width_loss(run, run.student(**batch).loss)

    value = loss()
    drawn = [choice.chosen for choice in run.choices]
    gradients = torch.autograd.grad(value, [choice.logits for choice in run.choices])
    assert all(float(gradient.abs().max()) > 1e-5 for gradient in gradients)
    for choice, gradient in zip(run.choices, gradients, strict=True):
        for position in range(choice.count):
            sides = []
            for shift in (1e-5, -1e-5):
                with torch.no_grad():
                    choice.logits[position] += shift
                sides.append(float(loss().detach()))
                assert [each.chosen for each in run.choices] == drawn
                with torch.no_grad():
                    choice.logits[position] -= shift
            assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(float(gradient[position]), rel=1e-3, abs=1e-6)


# --- expansion ---


def test_a_preferred_largest_candidate_gets_a_larger_one() -> None:
    run = prepared(threshold=0.4, epochs=8, step=0.125, max_width=1.25)
    first, second, *others = run.choices
    assert first.candidates == (5, 6, 8, 10, 11, 13, 14, 16, 18, 20) and first.count == 8
    set_probabilities(run, -1, 0.0)
    assert run.method.expand(run, 0) == [], "uniform: the largest is not preferred"
    with torch.no_grad():
        first.logits[7] = math.log(0.41 / 0.59 * 7)  # a probability of 0.41
        second.logits[7] = math.log(0.39 / 0.61 * 7)
    assert run.method.expand(run, 0) == [first.name]
    assert first.count == 9 and all(choice.count == 8 for choice in (second, *others))
    probabilities = first.probabilities.tolist()
    assert probabilities[8] == pytest.approx(probabilities[7]) and sum(probabilities) == pytest.approx(1)
    with torch.no_grad():
        first.logits[8] = 9.0
    assert run.method.expand(run, 5) == [first.name] and run.method.expand(run, 5) == [], "probabilities were halved"
    with torch.no_grad():
        first.logits[9] = second.logits[7] = 9.0
    assert run.method.expand(run, 6) == [], "the last quarter of the epochs"
    assert run.method.expand(run, 5) == [second.name], "the first one cannot grow beyond max_width"


def test_widths_are_multiples_and_a_threshold_of_1_never_expands() -> None:
    assert build(channel_multiple=8, max_width=1.5).candidates(32) == ([8, 16, 24, 32], [40, 48])
    assert build(choices=[0.25, 1.0], step=0.5).candidates(16) == ([4, 16], [24, 32])
    assert build(threshold=1.0).candidates(16)[1] == []
    assert build(channel_multiple=16).candidates(16) == ([16], [32])
    assert build(choices=[1.0], step=0.1, max_width=1.3).candidates(10) == ([10], [11, 12, 13]), "13.000000000000002"
    assert build(choices=[1.0], step=0.15, max_width=1.15).candidates(20) == ([20], [23]), "22.999999999999996"


def test_the_temperature_falls_as_a_cosine() -> None:
    method = build()
    assert [method.temperature(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx([5.0, 2.55, 0.1])


# --- budgets ---


@pytest.mark.parametrize(("macs", "parameters"), [(0.6, 1.0), (1.0, 0.55), (0.7, 0.7)])
def test_widths_beyond_a_budget_are_narrowed(macs: float, parameters: float) -> None:
    run = prepared("resnet-bottleneck", budget={"macs": macs}, second_budget={"parameters": parameters})
    set_probabilities(run, -1, 1.0)
    with torch.no_grad():  # one that must not be narrowed, and one that costs nothing to narrow
        run.choices[2].logits[run.choices[2].count - 1] = 50.0
        run.choices[3].logits.zero_()
        run.choices[3].logits[run.choices[3].count - 1] = 1e-4
    positions = run.fit_budgets()
    assert positions[2] == run.choices[2].count - 1 and positions[3] == 0
    for measure, keep in (("macs", macs), ("parameters", parameters)):
        assert run.share(measure, positions) <= keep
    assert max(run.share("macs", positions) / macs, run.share("parameters", positions) / parameters) > 0.9


def test_without_expansion_the_search_ends_near_its_budget() -> None:
    """The most probable networks of the last epochs; with few layers, the steps between networks are large."""
    _, facts = search(threshold=1.0, budget={"macs": 0.7}, epochs=8, width_lr=0.1, batches=images(128))
    last = [share for _, share in facts["macs_kept_curve"][4:]]
    assert facts["expansions"] == 0 and abs(sum(last) / 4 - 0.7) < 0.08
    assert 0.6 < facts["macs_kept"] <= 0.7
    assert all(width <= before for before, width in facts["widths"].values())


def test_widths_that_use_neither_budget_are_widened() -> None:
    """The part that loses least probability first, within both budgets; a part that may not grow stays."""
    run = prepared(budget={"macs": 0.9}, second_budget={"parameters": 0.8})
    set_probabilities(run, 0, 1.0)
    with torch.no_grad():
        run.choices[0].logits[0] = 50.0
        run.choices[3].logits.zero_()
        run.choices[3].logits[0] = 1e-4
    positions = run.fit_budgets()
    shares = {"macs": run.share("macs", positions) / 0.9, "parameters": run.share("parameters", positions) / 0.8}
    assert positions[0] == 0 and positions[3] == run.choices[3].count - 1
    assert 0.95 <= max(shares.values()) <= 1
    set_probabilities(run, 0, 1.0)
    for choice in run.choices:
        choice.count = 2
    assert run.fit_budgets() == [1, 1, 1, 1], "nothing can be wider"


@pytest.mark.parametrize("budget", [{"macs": 0.1}, {"parameters": 0.1}])
def test_a_budget_below_the_smallest_choice(budget: dict[str, float]) -> None:
    network = BUILDS["resnet"]()
    before = copy.deepcopy(network.state_dict())
    (measure,) = budget
    with pytest.raises(BudgetError, match=rf"allow at least {measure}=0\.\d\d, or give smaller choices") as error:
        build(budget=budget).apply(Model(network), MethodContext(batches=images(64)))
    least = float(str(error.value).split(f"least {measure}=")[1].split(",")[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    smallest = Model(BUILDS["resnet"]())
    build(budget={measure: least}, epochs=1).apply(smallest, MethodContext(batches=images(64)))
    assert [part.units for part in smallest.anatomy.parts] == pytest.approx([5, 5, 7, 7], abs=3)


# --- the whole search ---


def grown() -> tuple[Model, dict[str, list[int]]]:
    """Return a network whose first part is wider than before, the second narrower."""
    run = prepared()
    set_probabilities(run, -1, 0.1)
    first, second, *_ = run.choices
    first.expand()
    with torch.no_grad():
        first.logits[first.count - 1] = second.logits[3] = 5.0
    return run.model, run.derive(run.fit_budgets())


def test_layers_get_larger_candidates_and_both_budgets_are_kept() -> None:
    model, facts = search(threshold=0.14, epochs=6, width_lr=0.2, second_budget={"parameters": 0.95})
    before, after = count_by_hand(BUILDS["resnet"]()), count_by_hand(copy.deepcopy(model.network))
    assert facts["expansions"] >= 1
    assert facts["macs_kept"] == pytest.approx(after["macs"] / before["macs"]) and facts["macs_kept"] <= 1
    assert facts["parameters_kept"] == pytest.approx(after["parameters"] / before["parameters"])
    assert facts["parameters_kept"] <= 0.95
    assert facts["parameters_removed"] == before["parameters"] - after["parameters"]
    assert [part.units for part in model.anatomy.parts] == [width for _, width in facts["widths"].values()]
    assert [step for step, _ in facts["parameters_kept_curve"]] == [2, 4, 6, 8, 10, 12]
    assert not any(isinstance(module, SearchedConvolution) for module in model.network.modules())
    assert all(parameter.grad is None for parameter in model.network.parameters())


@torch.no_grad()
def test_the_result_reloads_with_wider_and_narrower_layers(tmp_path: Path) -> None:
    model, widths = grown()
    assert list(widths.values())[:2] == [[16, 18], [16, 10]]
    save_artifact(model, tmp_path)
    again = load_artifact(tmp_path)
    assert torch.equal(again.network(**inputs("resnet")).logits, model.network(**inputs("resnet")).logits)
    assert again.anatomy.shape() == model.anatomy.shape()
    assert [entry["of"] for entry in again.anatomy.shape()] == [old for old, _ in widths.values()]
    content = json.loads((tmp_path / "smelt.json").read_text())
    content["shape"][0]["units"] = 16 * 16 + 1
    (tmp_path / "smelt.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"shape of .*layers\.0\.layer\.0\.channels in smelt\.json does not fit"):
        load_artifact(tmp_path)
    content["shape"][0]["units"] = 20
    (tmp_path / "smelt.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"is \[18, 8, 3, 3\] and not \[20, 8, 3, 3\] as smelt\.json says"):
        load_artifact(tmp_path)


def test_training_goes_on_with_the_same_quantizers(tmp_path: Path) -> None:
    model, _ = grown()
    settings = {"epochs": 6, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, **W2A2}
    METHODS.build("qat", **settings).apply(model, MethodContext(batches=images(), folder=tmp_path, seed=1))
    assert accuracy(model, images()) > 0.85
    folder = tmp_path / "saved"
    folder.mkdir()
    save_artifact(model, folder)
    again = load_artifact(folder)
    assert len(quantized_layers(again.network)) == len(quantized_layers(model.network)) > 8
    assert torch.equal(again.network(**inputs("resnet")).logits, model.network(**inputs("resnet")).logits)


def test_an_interrupted_search_resumes_to_the_bit(tmp_path: Path) -> None:
    settings = {"threshold": 0.14, "width_lr": 0.2, "augment": True}
    whole, facts = search(tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "cut", progress=Interrupted(2), **settings)
    resumed, again = search(tmp_path / "cut", **settings)
    assert again == facts and facts["expansions"] > 0
    states = [model.network.state_dict() for model in (whole, resumed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_dtypes_are_kept_and_training_lowers_the_loss() -> None:
    model = Model(BUILDS["resnet"]().to(torch.bfloat16), source="tiny")
    batches = [{**batch, "pixel_values": batch["pixel_values"].float()} for batch in images()]
    facts = build(epochs=6).apply(model, MethodContext(batches=batches, seed=1))
    assert {parameter.dtype for parameter in model.network.parameters()} == {torch.bfloat16}
    losses = [loss for _, loss in facts["loss_curve"]]
    assert losses[-1] < 0.9 * losses[0] and facts["final_loss"] == losses[-1]


# --- bad input ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": {"bytes": 0.5}}, "budgets of nce are of macs and parameters"),
        ({"second_budget": {"macs": 0.5}}, "both budgets of nce limit macs"),
        ({"choices": []}, "largest is 1"),
        ({"choices": [0.5, 0.9]}, "largest is 1"),
        ({"choices": [0.5, 1.0, 1.5]}, "largest is 1"),
        ({"threshold": 1.5}, "threshold"),
        ({"max_width": 0.5}, "max_width"),
        ({"max_width": 9.0}, "max_width"),
        ({"step": 0.001}, "step"),
        ({"expand_until": 1.5}, "expand_until"),
        ({"initial_temperature": 0.0}, "initial_temperature"),
        ({"final_temperature": 1000.0}, "final_temperature"),
        ({"cost_weight": -1.0}, "cost_weight"),
        ({"tolerance": 0.6}, "tolerance"),
        ({"width_lr": 0.0}, "width_lr"),
        ({"width_weight_decay": -1.0}, "width_weight_decay"),
        ({"channel_multiple": 0}, "channel_multiple"),
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 1}, "batch_size"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(**settings)


def test_networks_and_data_that_cannot_work() -> None:
    with pytest.raises(ModelError, match="as ResNets have; this is a bert network"):
        build().apply(Model(BUILDS["bert"]()), MethodContext(batches=[labeled("bert")]))
    with pytest.raises(ModelError, match="this is a vit network"):
        build().apply(Model(BUILDS["vit"]()), MethodContext(batches=images(8)))
    with pytest.raises(RecipeError, match="channel_multiple of nce is 16, which does not divide the 24 channels"):
        build(channel_multiple=16).apply(Model(BUILDS["resnet"]()), MethodContext(batches=images(8)))
    unlabeled = [{"pixel_values": batch["pixel_values"]} for batch in images(32)]
    with pytest.raises(DataError, match="the data has none"):
        build().apply(Model(BUILDS["resnet"]()), MethodContext(batches=unlabeled))
    with pytest.raises(DivergenceError, match="not finite in epoch 1; lower the learning rate"):
        search(optimizer={"name": "sgd", "lr": 1e30}, epochs=1)
    model = Model(BUILDS["resnet"](), source="tiny")
    METHODS.build("rtn", bits=8, group_size=-1).apply(model, MethodContext())
    with pytest.raises(ModelError, match="quantized already"):
        build().apply(model, MethodContext(batches=images(8)))


def test_the_defaults_are_those_of_the_card() -> None:
    method = METHODS.build("nce", budget="macs=0.8")
    assert isinstance(method, Nce) and method.budgets == {"macs": 0.8, "parameters": 1.0}
    assert method.weights == Sawb(bits=2) and method.inputs is not None and method.inputs.name == "pact"
    assert METHODS.build("nce", budget="parameters=0.7", second_budget="macs=0.9").targets() == {
        "macs": 0.9, "parameters": 0.7,
    }  # fmt: skip


def test_later_steps_know_what_is_certain_about_the_widths() -> None:
    """Groups of 4 divide multiples of 4 only; what to do is said before the run."""
    step, settings = {"method": "gptq", "bits": 4, "group_size": 8}, {**FAST, "method": "nce", "channel_multiple": 4}
    with pytest.raises(RecipeError, match=r"use `channel_multiple: 8` in nce, or `allow_partial_group: true`"):
        check_steps(BUILDS["resnet"](), Recipe.parse({"steps": [settings, step]}))
    check_steps(BUILDS["resnet"](), Recipe.parse({"steps": [settings, {**step, "group_size": 4}]}))
    check_steps(BUILDS["resnet"](), Recipe.parse({"steps": [{**settings, "channel_multiple": 8}, step]}))


def test_the_estimate_grows_with_the_largest_candidate_and_the_epochs() -> None:
    anatomy, size = anatomy_of(BUILDS["resnet"]()), CalibrationSize(64, 1, 16)
    narrow, wide = (build(max_width=width).estimate_resources(anatomy, size, None) for width in (1.0, 2.0))
    parameters = sum(parameter.numel() for parameter in anatomy.network.parameters())
    assert narrow.memory == pytest.approx(3 * 4 * parameters + gradient_bytes(anatomy, 16, 1), rel=1e-6)
    assert wide.memory == pytest.approx(2 * narrow.memory, rel=1e-6)
    assert build(epochs=8).estimate_resources(anatomy, size, None).passes == 2 * wide.passes > 0


def test_a_network_in_host_memory_is_searched_on_the_device_of_the_context() -> None:
    context = MethodContext(batches=images(64), device=torch.device("cpu"))
    run = ChannelSearchRun(build(), Model(BUILDS["resnet"]()), context)
    assert (
        run.device
        == torch.device("cpu")
        == ChannelSearchRun(build(), Model(BUILDS["resnet"]()), MethodContext(batches=images(64))).device
    )
