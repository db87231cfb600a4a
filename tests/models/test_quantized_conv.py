"""Quantized convolutions agree with a plain convolution of the dequantized weight, in every shape and format."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from smelt.compression.distillation.quantizers import WeightQuantizer
from smelt.compression.distillation.quantizers.minmax import MinMax
from smelt.compression.distillation.quantizers.sawb import Sawb
from smelt.compression.distillation.quantizers.twn import Twn
from smelt.errors import ModelError
from smelt.kernels.conv import ConvShape, reference_conv
from smelt.kernels.dispatch import use_backend
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedConv
from smelt.models.quantized_network import linear_weight, prepare_quantized_layers, quantized_replacement
from smelt.numerics.catalog import get_format
from smelt.numerics.format import PER_TENSOR, Format, QuantizedTensor, QuantParams
from smelt.numerics.integer import Integer

SHAPES: dict[str, tuple[type[nn.Module], dict[str, object], tuple[int, ...]]] = {
    "3x3": (nn.Conv2d, {"in_channels": 16, "out_channels": 24, "kernel_size": 3, "padding": 1}, (9, 7)),
    "stride": (nn.Conv2d, {"in_channels": 5, "out_channels": 7, "kernel_size": 3, "stride": 2, "padding": 1}, (11, 8)),
    "1x1": (nn.Conv2d, {"in_channels": 8, "out_channels": 4, "kernel_size": 1, "stride": 2, "bias": False}, (5, 5)),
    "patches": (nn.Conv2d, {"in_channels": 3, "out_channels": 10, "kernel_size": 4, "stride": 4}, (12, 16)),
    "uneven": (
        nn.Conv2d,
        {
            "in_channels": 6, "out_channels": 9, "kernel_size": (3, 5), "stride": (1, 3), "padding": (2, 0),
            "dilation": (2, 1),
        },
        (10, 13),
    ),
    "same": (nn.Conv2d, {"in_channels": 4, "out_channels": 6, "kernel_size": (2, 4), "padding": "same"}, (6, 9)),
    "groups": (nn.Conv2d, {"in_channels": 12, "out_channels": 18, "kernel_size": 3, "groups": 3}, (6, 6)),
    "depthwise": (
        nn.Conv2d, {"in_channels": 8, "out_channels": 8, "kernel_size": 3, "padding": 1, "groups": 8}, (7, 7),
    ),
    "1-d": (nn.Conv1d, {"in_channels": 10, "out_channels": 12, "kernel_size": 3, "stride": 2, "padding": 1}, (21,)),
    "1-d dilated": (nn.Conv1d, {"in_channels": 4, "out_channels": 5, "kernel_size": 2, "dilation": 3}, (9,)),
}  # fmt: skip
INPUTS = {
    "float": (None, False), "dynamic": ("int8", False), "static": ("int8", True), "int4": ("int4", True),
    "zero point": ("int8-asym", True), "int4 zero point": ("int4-asym", True), "uint2": ("uint2", True),
    "uint7": ("uint7", True), "uint8": ("uint8", True),
}  # fmt: skip
LOW_BITS: dict[str, WeightQuantizer] = {
    "2 bits": Sawb(2), "2 bits, channel": Sawb(2, granularity="channel"), "ternary": Sawb(2, zero=True),
    "3 bits": Sawb(3), "5 bits": Sawb(5), "7 bits with zero": Sawb(7, zero=True), "twn": Twn(),
    "int3/32": MinMax("int3/32"),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(len(name))
    kind, settings, size = SHAPES[name]
    module = kind(**settings)
    return module, torch.randn(3, settings["in_channels"], *size)  # type: ignore[arg-type]


def quantized(module: nn.Module, weight: Format, inputs: str, x: Tensor) -> QuantizedConv:
    format_name, static = INPUTS[inputs]
    input_format = None if format_name is None else get_format(format_name)
    if input_format is not None and static:
        input_format = input_format.with_group_size(PER_TENSOR)
    layer = quantized_replacement(module, QuantizationScheme(weight, input_format, static))
    assert isinstance(layer, QuantizedConv)
    layer.set_tensors(weight.quantize(linear_weight(module).detach()), module.bias)  # type: ignore[arg-type]
    if static and layer.scheme.has_static_zero_point:
        assert input_format is not None
        qparams = input_format.compute_qparams(x.clamp(min=-0.8).reshape(1, 1, -1))
        layer.set_static_inputs(qparams.scale, qparams.zero)
    elif static:
        layer.set_static_input_scale(x.abs().amax()[None])
    return layer


@pytest.mark.parametrize("name", SHAPES)
def test_unfolded_images_times_the_matrix_are_the_convolution(name: str) -> None:
    module, x = build(name)
    shape = ConvShape.of(module)
    rows = shape.unfold(shape.images(x))  # [positions, groups, columns]
    matrix = shape.to_matrix(module.weight).view(shape.groups, -1, shape.columns)  # type: ignore[arg-type]
    products = torch.einsum("pgc,goc->pgo", rows, matrix).flatten(1)
    expected = module(x)
    bias = 0 if module.bias is None else module.bias
    actual = (products + bias).view(len(x), -1, shape.out_channels).transpose(1, 2).reshape(expected.shape)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(shape.to_weight(shape.to_matrix(module.weight)).reshape(module.weight.shape), module.weight)


@pytest.mark.parametrize(("name", "inputs"), itertools.product(SHAPES, INPUTS))
@pytest.mark.parametrize("weight", [Integer(-1, "float16", 8, True), Integer(-1, "float16", 4, False)], ids=str)
def test_every_backend_agrees_with_the_reference(name: str, inputs: str, weight: Integer) -> None:
    module, x = build(name)
    layer = quantized(module, weight, inputs, x)
    shape = layer.shape
    expected = shape.outputs(reference_conv(shape.images(x), shape, layer.packed, layer.inputs, layer.bias), x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=2e-4, atol=2e-4)
        with use_backend("reference"):
            torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert layer(x).shape == module(x).shape


@pytest.mark.parametrize("weights", LOW_BITS)
@pytest.mark.parametrize(
    ("name", "inputs"), itertools.product(["3x3", "uneven", "1-d"], ["uint2", "int4", "zero point"])
)
def test_low_bits_run_as_integers(name: str, inputs: str, weights: str) -> None:
    """Codes of 2 bits without a zero are odd numbers of half steps; unsigned inputs are half of the signed ones."""
    module, x = build(name)
    quantizer = LOW_BITS[weights]
    layer = quantized(module, quantizer.format, inputs, x)
    layer.set_tensors(quantizer.quantize(linear_weight(module).detach(), {}), module.bias)  # type: ignore[arg-type]
    layer.set_static_inputs(torch.tensor(0.4), torch.tensor(3) if layer.scheme.has_static_zero_point else None)
    shape = layer.shape
    expected = shape.outputs(reference_conv(shape.images(x), shape, layer.packed, layer.inputs, layer.bias), x)
    stored = layer.packed.tensors["codes"]
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=2e-4, atol=2e-4)
    assert layer.packed.tensors["codes"] is stored
    if layer.backend == "reference":
        pytest.skip("no compiled kernels here")
    assert layer.backend == "cpu-integer"


@pytest.mark.parametrize("inputs", ["static", "dynamic", "zero point", "uint2"])
def test_inputs_that_require_gradients_have_the_same_outputs(inputs: str) -> None:
    module, x = build("3x3")
    layer = quantized(module, Integer(-1, "float16", 8, True), inputs, x)
    x.requires_grad_()
    y = layer(x)
    torch.testing.assert_close(y, layer(x.detach()), rtol=2e-4, atol=2e-4)
    assert layer.inputs is not None
    expected = layer.shape.convolve(layer.inputs.fake_quantize(x.flatten(1)).view_as(x), layer.weight, layer.bias)
    torch.testing.assert_close(y, expected)


def test_levels_that_are_no_integers_stay_in_float() -> None:
    module, x = build("3x3")
    weight = Integer(-1, "float32", 2, False, zero_dtype="float32")
    layer = quantized(module, weight, "uint2", x)
    codes = torch.randint(0, 4, (24, 144), dtype=torch.uint8)
    qparams = QuantParams(torch.full((24, 1, 1), 0.1), torch.full((24, 1, 1), 1.3))
    layer.set_tensors(QuantizedTensor(weight, codes, qparams), module.bias)  # type: ignore[arg-type]
    layer.set_static_inputs(torch.tensor(0.4), None)
    expected = reference_conv(x, layer.shape, layer.packed, layer.inputs, layer.bias)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=2e-4, atol=2e-4)
    assert layer.backend != "cpu-integer"


def test_static_inputs_are_moved_to_the_device_of_the_weight() -> None:
    module, x = build("1x1")
    layer = quantized(module, Integer(-1, "float16", 8, True), "zero point", x).to("meta")
    layer.set_static_inputs(torch.tensor(0.5), torch.tensor(3))
    assert [tensor.device.type for tensor in layer.static_inputs if tensor is not None] == ["meta", "meta"]


def test_an_integer_product_runs_where_it_can() -> None:
    module, x = build("3x3")
    layer = quantized(module, Integer(-1, "float16", 8, True), "static", x)
    layer(x)
    grouped = quantized(build("groups")[0], Integer(-1, "float16", 8, True), "dynamic", build("groups")[1])
    grouped(build("groups")[1])
    if layer.backend == "reference":
        pytest.skip("no compiled kernels here")
    assert layer.backend == "cpu-integer"
    assert grouped.backend == "cpu-float"


@pytest.mark.parametrize("name", ["3x3", "uneven", "1-d"])
def test_images_with_a_zero_point_are_padded_with_its_value(name: str) -> None:
    """An integer product that pads shifted images with codes of zero is wrong at the edges, by the offset."""
    module, x = build(name)
    layer = quantized(module, Integer(-1, "float32", 8, True), "zero point", x)
    assert layer.inputs is not None and float(layer.inputs.offset) > 0.5
    with torch.no_grad():
        outside = layer(torch.zeros_like(x))
        layer(x)
    bias = 0 if module.bias is None else module.bias.view(-1, *[1] * (x.dim() - 2))  # type: ignore[operator]
    torch.testing.assert_close(outside, torch.zeros_like(outside) + bias, rtol=0, atol=1e-5)
    if layer.backend == "reference":
        pytest.skip("no compiled kernels here")
    assert layer.backend == "cpu-integer"


def test_each_image_has_its_own_dynamic_scale() -> None:
    module, x = build("3x3")
    layer = quantized(module, Integer(-1, "float16", 8, True), "dynamic", x)
    with torch.no_grad():
        alone = layer(x[:1])
        x[1:] *= 100
        torch.testing.assert_close(layer(x)[:1], alone)


def test_empty_batches_and_images_without_a_batch() -> None:
    module, x = build("stride")
    layer = quantized(module, Integer(-1, "float16", 8, True), "static", x)
    with torch.no_grad():
        assert layer(x[:0]).shape == module(x[:0]).shape
        torch.testing.assert_close(layer(x[0]), layer(x)[0])


def test_what_cannot_be_quantized_is_refused() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.Conv3d(3, 4, 3))
    scheme = {"weight": "int8"}
    with pytest.raises(ModelError, match="pads with reflect"):
        prepare_quantized_layers(network, {"0": scheme}, "smelt.json")
    with pytest.raises(ModelError, match="1 is not a linear layer, convolution or embedding"):
        prepare_quantized_layers(network, {"1": scheme}, "smelt.json")
    with pytest.raises(ModelError, match="no rotated inputs"):
        prepare_quantized_layers(nn.Sequential(nn.Conv2d(3, 4, 3)), {"0": {**scheme, "hadamard": True}}, "smelt.json")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["3x3", "stride", "1x1", "groups", "1-d"])
@pytest.mark.parametrize("inputs", INPUTS)
def test_a_gpu_agrees_with_the_reference(name: str, inputs: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    module, x = build(name)
    layer = quantized(module, Integer(-1, "float16", 8, True), inputs, x).cuda().bfloat16()
    x = x.cuda().bfloat16()
    shape = layer.shape
    expected = shape.outputs(reference_conv(shape.images(x), shape, layer.packed, layer.inputs, layer.bias), x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-2)
