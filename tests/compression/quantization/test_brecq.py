"""BRECQ and QDrop: AdaRound's formulas, both limits of the drop probability, the result that is packed, errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smelt.compression.base import CalibrationSize, MethodContext
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization.brecq import (
    AdaRound,
    Brecq,
    LearnedStep,
    reconstruction_loss,
    regularizer_power,
)
from smelt.compression.quantization.rounding import round_to_nearest
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.errors import DataError, ModelError, RecipeError
from smelt.kernels.linear import ActivationQuant
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear, float_activations, quantized_layers
from smelt.numerics.catalog import get_format
from smelt.numerics.format import PER_TENSOR
from smelt.numerics.integer import Integer
from tests.compression.quantization.test_base import same
from tests.tiny import BUILDS, inputs

ROW2, ROW3 = Integer(-1, "float16", 2, symmetric=False), Integer(-1, "float16", 3, symmetric=False)
QUICK = {"iterations": 8, "activation_iterations": 4, "lr": 0.05}
W2A4 = {"bits": 2, "input_activations": "int4", **QUICK}


def batches(name: str = "resnet", count: int = 4) -> list[dict[str, Tensor]]:
    return [inputs(name, seed=number) for number in range(count)]


def quantized(settings: dict[str, Any], name: str = "resnet", **context: Any) -> tuple[Model, dict[str, Any]]:
    model = Model(BUILDS[name]())
    facts = Brecq(**settings).apply(model, MethodContext(batches=batches(name), **context))
    return model, facts


def block_errors(facts: dict[str, Any]) -> list[dict[str, float]]:
    return [layer["block_error"] for layer in facts["layers"].values() if "block_error" in layer]


def codes(model: Model) -> dict[str, Tensor]:
    return {path: layer.packed.unpack().codes for path, layer in quantized_layers(model.network).items()}


def test_soft_rounding_is_the_formula_and_starts_at_the_fraction_of_each_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 20)
    rounding = AdaRound(weight, ROW3)
    with torch.no_grad():
        values, grouped = rounding(), rounding.grouped.flatten(1)
        scale, zero = rounding.scale.flatten(1), rounding.zero
        assert isinstance(zero, Tensor)
        h = rounding.rounding().flatten(1)
        for row in range(6):
            s, z = scale[row].item(), zero.flatten(1)[row].item()
            for column in range(20):
                step = grouped[row, column].item() / s
                v = rounding.logits.flatten(1)[row, column].item()
                expected_h = min(max(1.2 / (1 + math.exp(-v)) - 0.1, 0.0), 1.0)
                assert h[row, column].item() == pytest.approx(expected_h, abs=1e-6)
                assert expected_h == pytest.approx(step - math.floor(step), abs=1e-4)
                expected = s * (min(max(math.floor(step) + expected_h + z, 0), 7) - z)
                assert values[row, column].item() == pytest.approx(expected, abs=1e-5)
        inside = (weight / scale + zero.flatten(1)).clamp(0, 7) == weight / scale + zero.flatten(1)
        assert inside.float().mean() > 0.8
        assert torch.allclose(values[inside], weight[inside], atol=1e-5)  # before training, W itself


def test_hard_rounding_is_floor_or_ceil_and_what_the_layer_stores() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 30)
    rounding = AdaRound(weight, ROW2)
    rounding.hard = True
    assert torch.equal(rounding().detach(), round_to_nearest(weight, ROW2, search=True).dequantize())
    with torch.no_grad():
        rounding.logits.copy_(torch.randn_like(rounding.logits))
    values, scale = rounding().detach(), rounding.scale.flatten(1)
    up = (rounding.logits.flatten(1) >= 0).float()
    zero = rounding.zero
    assert isinstance(zero, Tensor)
    expected = ((weight / scale).floor() + up + zero.flatten(1)).clamp(0, 3) - zero.flatten(1)
    assert torch.equal(values, expected * scale)
    layer = QuantizedLinear.from_quantized(rounding.result(), QuantizationScheme(ROW2), bias=None, dtype=torch.float32)
    assert torch.equal(layer.weight, values)


def test_the_regularizer_counts_undecided_weights_and_its_power_is_annealed() -> None:
    rounding = AdaRound(torch.randn(3, 10), ROW3)
    with torch.no_grad():
        rounding.logits.copy_(torch.linspace(-3, 3, 30).view_as(rounding.logits))
    for power in (20.0, 2.0):
        h = rounding.rounding().flatten().tolist()
        expected = sum(1 - abs(2 * value - 1) ** power for value in h)
        assert rounding.regularizer(power).item() == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        rounding.logits.copy_(rounding.logits.sign() * 10)
    assert rounding.regularizer(2.0).item() == 0
    powers = [regularizer_power(update, 100) for update in range(100)]
    assert powers[:20] == [None] * 20 and powers[20] == 20.0
    assert powers[60] == pytest.approx(11.0) and powers[99] == pytest.approx(2 + 18 / 80)


def test_the_loss_sums_over_channels_and_averages_over_the_rest() -> None:
    output, target = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    expected = (output - target).square().sum() / (2 * 4 * 5)
    assert reconstruction_loss(output, target, None).item() == pytest.approx(expected.item(), rel=1e-5)
    tokens, wanted, mask = torch.randn(2, 4, 6), torch.randn(2, 4, 6), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    expected = (tokens - wanted).square()[mask].sum() / 4
    assert reconstruction_loss(tokens, wanted, mask).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("name", "sign"), [("int4", False), ("int3", True)])
def test_a_learned_step_is_the_static_quantization_of_packed_layers(name: str, sign: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 100) if sign else torch.randn(5, 100).relu()
    step = LearnedStep(x, get_format(f"{name}/tensor"))
    expected_format = get_format(f"{name}/tensor" if sign else f"u{name}/tensor")
    assert step.format == expected_format
    reference = ActivationQuant(expected_format, step.scale.detach().view(1, 1, 1))
    assert torch.equal(step(x).detach(), reference.fake_quantize(x))
    # Gradients of the scale: round(x / s) - x / s inside the range, the level outside of it (LSQ).
    step(x).sum().backward()
    with torch.no_grad():
        steps = x / step.scale
        inside = (steps.round() >= step.low) & (steps.round() <= step.high)
        expected = torch.where(inside, steps.round() - steps, steps.clamp(step.low, step.high)).sum()
    assert step.scale.grad is not None and step.scale.grad.item() == pytest.approx(expected.item(), rel=1e-3)


def test_the_first_scale_has_the_least_error_of_all_that_are_tried() -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(2000).relu(), torch.tensor([30.0])])
    step = LearnedStep(x, get_format("int4/tensor"))
    errors = {}
    for percent in range(20, 101):
        scale = 30.0 / 15 * percent / 100
        errors[scale] = float((((x / scale).round().clamp(0, 15) * scale) - x).abs().pow(2.4).mean())
    best = min(errors, key=lambda scale: errors[scale])
    assert step.scale.item() == pytest.approx(best, rel=1e-4)
    assert LearnedStep(-x, get_format("int4/tensor")).scale.item() < 30 / 8 + 1e-6  # eight levels below zero


@pytest.mark.parametrize("settings", [{"bits": 2}, {"input_activations": "int4", "bits": 2, "qdrop": 0.5}, W2A4])
def test_reconstruction_lowers_the_error_of_every_block_below_rounding_to_nearest(settings: dict[str, Any]) -> None:
    model, facts = quantized({**QUICK, "iterations": 60, "lr": 0.03, **settings})
    errors = block_errors(facts)
    assert len(errors) == len(model.anatomy.blocks)
    assert all(error["learned"] < 0.8 * error["nearest"] for error in errors), errors


@pytest.mark.parametrize(("name", "qdrop"), [("resnet", 0.5), ("bert", None), ("llama", 0.5)])
def test_the_packed_result_is_saved_and_reloads(name: str, qdrop: float | None, tmp_path: Path) -> None:
    model, _ = quantized({**W2A4, "qdrop": qdrop}, name)
    layers = quantized_layers(model.network)
    if name == "resnet":  # inputs of its convolutions come from ReLU
        assert all(layer.scheme.inputs == get_format("uint4/tensor") for layer in layers.values())
    assert all(layer.scheme.static and layer.static_inputs[0] is not None for layer in layers.values())
    save_artifact(model, tmp_path)
    loaded, batch = load_artifact(tmp_path), inputs(name, seed=9)
    with torch.no_grad():
        assert torch.equal(loaded.network(**batch)[0], model.network(**batch)[0])


def test_the_stored_block_is_the_block_whose_error_was_measured() -> None:
    """The packed layers, run in the network, have the error that the facts name."""
    original, (model, facts) = Model(BUILDS["resnet"]()), quantized({**W2A4, "qdrop": 0.5})
    outputs: list[list[Tensor]] = [[], []]
    for position, network in enumerate((original.network, model.network)):
        last = (original if position == 0 else model).anatomy.blocks[-1].module
        handle = last.register_forward_hook(lambda _, args, output, store=outputs[position]: store.append(output))
        with torch.no_grad():
            for batch in batches():
                network(**batch)
        handle.remove()
    errors = [reconstruction_loss(mine, wanted, None).item() for wanted, mine in zip(*outputs, strict=True)]
    assert block_errors(facts)[-1]["learned"] == pytest.approx(sum(errors) / len(errors), rel=1e-3)


def test_weights_are_learned_with_float_activations_first() -> None:
    """As if all weights were learned before all activations: their codes do not depend on the activations' bits."""
    weights_only, _ = quantized({**QUICK, "bits": 2})
    coarse, _ = quantized({**W2A4, "input_activations": "int2"})
    joint, _ = quantized({**W2A4, "input_activations": "int2", "qdrop": 0.0})
    assert all(torch.equal(codes(weights_only)[path], mine) for path, mine in codes(coarse).items())
    assert not all(torch.equal(codes(weights_only)[path], mine) for path, mine in codes(joint).items())


def test_a_drop_probability_of_one_is_the_float_network_and_zero_quantizes_everything() -> None:
    weights_only, _ = quantized({**QUICK, "bits": 2})
    none_quantized, _ = quantized({**W2A4, "qdrop": 1.0})
    first = [path for path in codes(weights_only) if path.startswith(weights_only.anatomy.blocks[0].path)]
    assert all(torch.equal(codes(weights_only)[path], codes(none_quantized)[path]) for path in first)
    untrained, _ = quantized({**W2A4, "qdrop": 0.0, "iterations": 0})
    all_quantized, _ = quantized({**W2A4, "qdrop": 0.0, "activation_lr": 0.01})
    scales = [
        {path: layer.static_inputs[0] for path, layer in quantized_layers(model.network).items()}
        for model in (untrained, none_quantized, all_quantized)
    ]
    # Dropped everywhere, scales get no gradient; in the first block they are searched on the same inputs.
    assert all(torch.equal(scales[0][path], scales[1][path]) for path in first)
    assert not any(torch.equal(scales[0][path], scales[2][path]) for path in first)
    assert not all(torch.equal(codes(all_quantized)[path], codes(none_quantized)[path]) for path in first)


def test_dropped_values_are_those_of_the_original_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """About the named share of the elements of a block's input and of its layers' inputs is in float."""
    from smelt.compression.quantization import brecq

    shares: list[float] = []
    drop = brecq._Reconstruction._drop

    def noted(self: Any, quantized: Tensor, original: Tensor, probability: float) -> Tensor:
        mixed = drop(self, quantized, original, probability)
        differ = quantized != original
        if probability == 0.25 and int(differ.sum()) > 1000:
            assert bool(((mixed == quantized) | (mixed == original)).all())
            shares.append(float((mixed == original)[differ].float().mean()))
        return mixed

    monkeypatch.setattr(brecq._Reconstruction, "_drop", noted)
    quantized({**W2A4, "qdrop": 0.25})
    assert len(shares) > 30 and all(abs(share - 0.25) < 0.06 for share in shares)


def test_scales_have_a_cosine_to_zero_and_the_rounding_a_constant_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[list[float]] = []
    step = torch.optim.Adam.step

    def noted(self: torch.optim.Adam) -> None:
        rates.append([group["lr"] for group in self.param_groups])
        step(self)

    monkeypatch.setattr(torch.optim.Adam, "step", noted)
    quantized({**W2A4, "iterations": 4, "lr": 0.05, "qdrop": 0.5, "activation_lr": 0.01})
    assert [rounding for rounding, _ in rates[:4]] == [0.05] * 4
    assert [scale for _, scale in rates[:4]] == pytest.approx([0.01, 0.00853553, 0.005, 0.00146447], rel=1e-4)
    rates.clear()
    quantized({**W2A4, "iterations": 2, "activation_iterations": 2})
    assert [len(each) for each in rates[:4]] == [1, 1, 1, 1] and rates[2:4] == [[4e-4], [pytest.approx(2e-4)]]


def test_the_plan_counts_every_store_of_hidden_states_and_every_update() -> None:
    anatomy, size = Model(BUILDS["resnet"]()).anatomy, CalibrationSize(64, 1, 8)
    plain, separate, joint = (
        Brecq(iterations=80, activation_iterations=16, **settings).estimate_resources(anatomy, size, None)  # type: ignore[arg-type]
        for settings in ({}, {"input_activations": "int4"}, {"input_activations": "int4", "qdrop": 0.5})
    )
    stored = RoundToNearest(bits=4, static_activations=True, input_activations="int8").estimate_resources(
        anatomy, size, None
    )
    assert joint.memory - plain.memory == separate.memory - plain.memory == stored.memory
    assert plain.memory > 2 * stored.memory
    assert separate.passes - plain.passes == pytest.approx(3 * 16 / 8) and joint.passes == plain.passes
    assert plain.passes > 3 * 80 / 8


@pytest.mark.parametrize("qdrop", [None, 0.5])
def test_a_resumed_run_gives_the_same_bits(qdrop: float | None, tmp_path: Path) -> None:
    settings = {**W2A4, "qdrop": qdrop}
    first, _ = quantized(settings, checkpoint=Checkpoint(tmp_path))
    for left in tmp_path.glob("block-[123].*"):
        left.unlink()
    again, _ = quantized(settings, checkpoint=Checkpoint(tmp_path))
    other, _ = quantized(settings, seed=1)
    assert same(first, again) and not same(first, other)


def test_activations_stay_in_float_inside_the_context() -> None:
    model, _ = quantized(W2A4)
    batch = inputs("resnet", seed=5)
    with torch.no_grad():
        before = model.network(**batch).logits
        with float_activations(model.network):
            inside = model.network(**batch).logits
        assert not torch.equal(inside, before) and torch.equal(model.network(**batch).logits, before)
        for layer in quantized_layers(model.network).values():
            layer.scheme = QuantizationScheme(layer.scheme.weight)
            layer._selected = None
        assert torch.equal(model.network(**batch).logits, inside)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"qdrop": 0.5}, "give their format"),
        ({"qdrop": 1.5, "input_activations": "int4"}, "must lie between 0 and 1"),
        ({"input_activations": "int4-asym"}, "must be int2 to int8"),
        ({"input_activations": "int4", "static_activations": True}, "leave out static_activations"),
        ({"format": "nf4"}, "plain integers"),
        ({"iterations": -1}, "iterations"),
        ({"lr": 0.0}, "lr"),
        ({"regularization": -1.0}, "regularization"),
        ({"activation_lr": 0.0}, "activation_lr"),
        ({"activation_iterations": -1}, "activation_iterations"),
    ],
)
def test_invalid_values_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Brecq(**settings)


def test_bad_inputs_are_one_sentence() -> None:
    with pytest.raises(DataError, match="needs calibration data, and there is none"):
        Brecq().apply(Model(BUILDS["resnet"]()), MethodContext())
    with pytest.raises(DataError, match="negative values, which uint4 sets to zero; use int4"):
        quantized({**W2A4, "input_activations": "uint4"}, "llama")
    model = Model(BUILDS["resnet"]())
    block = model.anatomy.blocks[0].module
    next(module for module in block.modules() if isinstance(module, nn.BatchNorm2d)).running_var.fill_(math.nan)  # type: ignore[union-attr]
    with pytest.raises((DataError, ModelError), match=r"not a finite number|NaN"):
        Brecq(**W2A4).apply(model, MethodContext(batches=batches()))


def test_partial_groups_and_tensor_scales_are_kept() -> None:
    model, _ = quantized({**QUICK, "bits": 3, "group_size": 36, "symmetric": True})
    sizes = {layer.scheme.weight.group_size for layer in quantized_layers(model.network).values()}
    assert sizes == {36, -1} and PER_TENSOR not in sizes
