"""Convolutions: every method that takes them, GPTQ on unfolded inputs with and without groups, saved and reloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smelt.compression.calibration.observers import HessianObserver
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization.gptq_rounding import gptq, round_group
from smelt.compression.quantization.layers import LayerGroup, LinearLayer
from smelt.compression.quantization.rounding import round_to_nearest
from smelt.errors import ModelError, RecipeError
from smelt.kernels.conv import ConvShape
from smelt.measure.cost import Workload, block_macs, count_bytes, count_parameters
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.model import Model
from smelt.models.quantized import QuantizedConv, quantized_layers
from smelt.models.verify import verify
from smelt.numerics.integer import Integer
from tests.compression.quantization.test_base import InterruptedRunError, InterruptingProgress, quantize_tiny, same
from tests.tiny import BUILDS, inputs

RESNETS = ("resnet", "resnet-bottleneck")
W8A8 = {"bits": 8, "group_size": -1, "symmetric": True, "input_activations": "int8"}
ROW4 = Integer(-1, "float32", 4, symmetric=False)


def smooth_images(count: int, channels: int) -> Tensor:
    """Return images whose neighboring pixels are similar, as in photographs."""
    noise = torch.randn(count, channels, 20, 20)
    return nn.functional.avg_pool2d(noise, 5, stride=1) + 0.05 * torch.randn(count, channels, 16, 16)


def convolution_group(module: nn.Conv2d) -> LayerGroup:
    return LayerGroup(anatomy_of(BUILDS["resnet"]()).parts[0], False, (LinearLayer(module, "conv"),))


def unfolded_hessian(module: nn.Conv2d, x: Tensor) -> HessianObserver:
    observer, shape = HessianObserver(), ConvShape.of(module)
    rows = shape.unfold(x)
    observer(rows[:, 0] if shape.groups == 1 else rows)
    return observer


@pytest.mark.parametrize("name", RESNETS)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "rtn", **W8A8},
        {"method": "hqq"},
        {"method": "gptq"},
        {"method": "gptq", **W8A8, "static_activations": True},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_convolution_of_the_blocks_is_quantized_and_reloads(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    original, model = Model(BUILDS[name]()), quantize_tiny(name, settings)
    convolutions = [
        path for path, module in original.network.resnet.encoder.named_modules() if isinstance(module, nn.Conv2d)
    ]
    layers = quantized_layers(model.network)
    assert set(layers) == {f"resnet.encoder.{path}" for path in convolutions}
    assert all(isinstance(layer, QuantizedConv) for layer in layers.values())
    assert count_parameters(model.network) == count_parameters(original.network)
    assert count_bytes(model.network) < 0.6 * count_bytes(original.network)
    workload = Workload(image_size=32)
    assert block_macs(model.anatomy, workload) == block_macs(original.anatomy, workload)
    save_artifact(model, tmp_path)
    loaded = load_artifact(tmp_path)
    batch = inputs(name)
    with torch.no_grad():
        assert torch.equal(loaded.network(**batch).logits, model.network(**batch).logits)
    if name == "resnet" and settings.get("static_activations"):
        verify(model, tmp_path)


@pytest.mark.parametrize("static", [False, True])
def test_eight_bits_change_the_outputs_little(static: bool) -> None:
    batch = inputs("resnet")
    with torch.no_grad():
        expected = BUILDS["resnet"]()(**batch).logits
        model = quantize_tiny("resnet", {"method": "gptq", **W8A8, "static_activations": static})
        error = (model.network(**batch).logits - expected).norm() / expected.norm()
    assert 0 < error < 0.03


def test_groups_that_do_not_divide_become_one_scale_per_channel() -> None:
    layers = quantized_layers(quantize_tiny("resnet", {"method": "rtn", "group_size": 48}).network)
    assert {layer.in_features % 48 == 0 for layer in layers.values()} == {True, False}
    for layer in layers.values():
        assert layer.scheme.weight.group_size == (48 if layer.in_features % 48 == 0 else -1)


def test_gptq_of_smooth_images_beats_rounding_to_nearest() -> None:
    torch.manual_seed(0)
    module, x = nn.Conv2d(6, 16, 3, padding=1, bias=False), smooth_images(8, 6)
    shape, matrix = ConvShape.of(module), ConvShape.of(module).to_matrix(module.weight).detach()
    expected = module(x).detach()
    errors = {}
    for name, quantized in {
        "gptq": round_group(convolution_group(module), unfolded_hessian(module, x), ROW4)[0],
        "rtn": round_to_nearest(matrix, ROW4),
    }.items():
        errors[name] = float((shape.convolve(x, quantized.dequantize(), None) - expected).square().mean())
    assert errors["gptq"] < 0.5 * errors["rtn"]


@pytest.mark.parametrize("groups", [2, 6])
def test_each_group_is_quantized_with_the_hessian_of_its_own_channels(groups: int) -> None:
    torch.manual_seed(0)
    module, x = nn.Conv2d(6, 12, 3, padding=1, groups=groups, bias=False), smooth_images(8, 6)
    quantized = round_group(convolution_group(module), unfolded_hessian(module, x), ROW4)[0].dequantize()
    for index, (weight, channels) in enumerate(zip(module.weight.chunk(groups), x.chunk(groups, 1), strict=True)):
        alone = nn.Conv2d(6 // groups, 12 // groups, 3, padding=1, bias=False)
        alone.weight.data = weight.data
        hessian = unfolded_hessian(alone, channels).matrix
        assert hessian is not None
        expected = gptq(ConvShape.of(alone).to_matrix(alone.weight), hessian, ROW4).dequantize()
        torch.testing.assert_close(quantized.chunk(groups)[index], expected)


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = {"method": "gptq", **W8A8, "static_activations": True}
    whole = quantize_tiny("resnet", settings)
    with pytest.raises(InterruptedRunError):
        quantize_tiny("resnet", settings, checkpoint=Checkpoint(tmp_path), progress=InterruptingProgress(2))
    assert same(whole, quantize_tiny("resnet", settings, checkpoint=Checkpoint(tmp_path)))


@pytest.mark.parametrize("method", ["awq", "smoothquant", "mixed"])
def test_methods_for_linear_layers_refuse_convolutions(method: str) -> None:
    with pytest.raises(ModelError, match="is a convolution; use rtn, hqq, gptq or brecq"):
        quantize_tiny("resnet", {"method": method})


def test_activation_groups_are_refused() -> None:
    with pytest.raises(RecipeError, match="one activation scale per image"):
        quantize_tiny("resnet", {"method": "rtn", "input_activations": "int8/32"})
