"""GPTQ: gains on correlated inputs, none on uncorrelated ones, and the same result for every block size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.observers import HessianObserver
from smelt.compression.quantization.gptq_rounding import gptq, round_group
from smelt.compression.quantization.layers import LayerGroup, LinearLayer, layer_groups
from smelt.errors import DataError, ModelError
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.numerics import FORMATS, QuantizedTensor, get_format
from smelt.numerics.error import signal_to_noise
from smelt.numerics.integer import Integer
from tests.tiny import BUILDS, inputs

ROW4, ROW2 = Integer(-1, "float32", 4, symmetric=False), Integer(-1, "float32", 2, symmetric=False)


def hessian(x: Tensor) -> Tensor:
    moment = HessianObserver()
    for rows in x.split(100):
        moment(rows)
    assert moment.matrix is not None
    return moment.matrix


def correlated(rows: int = 4096, columns: int = 256) -> Tensor:
    """Return inputs with sixteen strong common directions plus small noise."""
    return torch.randn(rows, 16) @ torch.randn(16, columns) + 0.3 * torch.randn(rows, columns)


def quality(x: Tensor, weight: Tensor, rounded: Tensor) -> float:
    """Return the output SNR in decibels."""
    return signal_to_noise(x @ weight.T, x @ rounded.T)


def layer_group(*weights: Tensor) -> LayerGroup:
    """Return layers that share an input, outside any network."""
    layers = []
    for index, weight in enumerate(weights):
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        module.weight.data = weight
        layers.append(LinearLayer(module, f"layer{index}"))
    return LayerGroup(anatomy_of(BUILDS["llama"]()).parts[0], True, tuple(layers))


def test_uncorrelated_inputs_gain_nothing() -> None:
    x, weight = torch.randn(8192, 256), torch.randn(256, 256)
    plain = quality(x, weight, ROW4.fake_quantize(weight))
    for act_order in (False, True):
        result = quality(x, weight, gptq(weight, hessian(x), ROW4, act_order=act_order).dequantize())
        assert abs(result - plain) < 0.2


@pytest.mark.parametrize(("number_format", "published"), [(ROW4, (19.4, 33.8, 36.2)), (ROW2, (5.4, 18.9, 22.0))])
def test_correlated_inputs_gain_what_the_card_says(number_format: Integer, published: tuple[float, ...]) -> None:
    x, weight = correlated(), torch.randn(256, 256)
    h = hessian(x)
    results = (
        quality(x, weight, number_format.fake_quantize(weight)),
        quality(x, weight, gptq(weight, h, number_format, act_order=False).dequantize()),
        quality(x, weight, gptq(weight, h, number_format, act_order=True).dequantize()),
    )
    assert results == pytest.approx(published, abs=1.5)  # the card does not say how strong its directions were
    assert results[0] + 10 < results[1] < results[2] - 1


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [-1, 0, 16, 48, 64, 96])
def test_the_column_block_size_changes_nothing(group: int, act_order: bool) -> None:
    """48 and 96 neither divide a block of 64 nor are divided by it."""
    x, weight = correlated(1024, 192), torch.randn(24, 192)
    number_format = Integer(group, "float32", 3, symmetric=False)
    one, other = (gptq(weight, hessian(x), number_format, act_order=act_order, block=b) for b in (64, 192))
    assert torch.allclose(one.qparams.scale, other.qparams.scale, rtol=1e-5)
    assert (one.codes == other.codes).float().mean() > 0.99  # a tie may fall either way
    assert quality(x, weight, one.dequantize()) == pytest.approx(quality(x, weight, other.dequantize()), abs=0.1)


def test_qparams_are_computed_from_the_updated_weights_of_each_group() -> None:
    x, weight = correlated(1024, 128), torch.randn(8, 128)
    number_format = Integer(32, "float32", 2, symmetric=False)
    result = gptq(weight, hessian(x), number_format, act_order=False)
    beforehand = number_format.quantize(weight)
    assert torch.equal(result.qparams.scale[:, 0], beforehand.qparams.scale[:, 0])
    assert not torch.equal(result.qparams.scale[:, 1:], beforehand.qparams.scale[:, 1:])
    ordered = gptq(weight, hessian(x), number_format, act_order=True)
    assert torch.equal(ordered.qparams.scale, beforehand.qparams.scale)


def test_it_matches_the_formula() -> None:
    """Reference: column by column with a full inverse Hessian, updated by elimination, in float64."""
    x, weight = correlated(512, 24), torch.randn(5, 24)
    number_format = Integer(-1, "float32", 3, symmetric=False)
    grid = number_format.quantize(weight).qparams
    h = hessian(x).double()
    inverse = torch.linalg.inv(h + 0.01 * h.diagonal().mean() * torch.eye(24, dtype=torch.float64))
    left, expected = weight.double(), torch.zeros(5, 24, dtype=torch.float64)
    for column in range(24):
        code = number_format.quantize_groups(left[:, column, None, None].float(), grid)
        expected[:, column] = number_format.dequantize_groups(code, grid)[:, 0, 0].double()
        error = (left[:, column] - expected[:, column]) / inverse[column, column]
        left = left - error[:, None] * inverse[column]
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    assert torch.allclose(gptq(weight, hessian(x), number_format, act_order=False).dequantize().double(), expected)


@pytest.mark.parametrize(("name", "act_order"), [(name, position % 2 == 0) for position, name in enumerate(FORMATS)])
def test_every_format_gains(name: str, act_order: bool) -> None:
    x, weight = correlated(512, 128), torch.randn(16, 128)
    result = gptq(weight, hessian(x), FORMATS[name], act_order=act_order)
    assert result.codes.shape == weight.shape
    reloaded = QuantizedTensor.from_packed(FORMATS[name], result.pack(), 128)
    assert torch.equal(reloaded.dequantize(), result.dequantize())
    assert quality(x, weight, result.dequantize()) > quality(x, weight, FORMATS[name].fake_quantize(weight)) + 3


def test_the_range_search_helps_at_two_bits_with_long_tails() -> None:
    x, weight = torch.randn(2048, 128), torch.distributions.StudentT(3.0).sample((64, 128))
    plain, searched = (gptq(weight, hessian(x), ROW2, search=search) for search in (False, True))
    assert quality(x, weight, searched.dequantize()) > quality(x, weight, plain.dequantize()) + 1


def test_dead_columns_are_zero_and_do_not_change_the_rest() -> None:
    x, weight = correlated(512, 64), torch.randn(8, 64)
    x[:, 60:] = 0
    result = gptq(weight, hessian(x), ROW4).dequantize()
    assert torch.equal(result[:, 60:], torch.zeros(8, 4))
    assert quality(x, weight, result) > 25


@pytest.mark.parametrize("rows", [1, 5])
def test_fewer_inputs_than_columns(rows: int) -> None:
    x, weight = torch.randn(rows, 64), torch.randn(8, 64)
    result = gptq(weight, hessian(x), ROW4)
    assert bool(result.dequantize().isfinite().all())
    assert quality(x, weight, result.dequantize()) > quality(x, weight, ROW4.fake_quantize(weight))


def test_an_indefinite_hessian_is_damped_until_positive() -> None:
    h = torch.eye(32)
    h[0, 1] = h[1, 0] = 1.05  # an eigenvalue of -0.05
    assert bool(gptq(torch.randn(4, 32), h, ROW4).dequantize().isfinite().all())


@pytest.mark.parametrize("name", ["int4-asym/16", "int3", "dint4", "mxfp4", "amxfp4", "nf4"])
def test_stacked_layers_match_separate_ones(name: str) -> None:

    x, weights = correlated(512, 64), [torch.randn(rows, 64) for rows in (24, 8, 8)]
    moment = HessianObserver()
    moment(x)
    for layer, weight in zip(round_group(layer_group(*weights), moment, get_format(name)), weights, strict=True):
        alone = gptq(weight, hessian(x), get_format(name))
        assert torch.equal(layer.codes, alone.codes)
        assert all(torch.equal(t, alone.qparams.tensors()[k]) for k, t in layer.qparams.tensors().items())


def test_a_per_tensor_scale_is_per_layer() -> None:
    weights = [torch.randn(8, 64), 10 * torch.randn(8, 64)]
    moment = HessianObserver()
    moment(correlated(512, 64))
    one, other = round_group(layer_group(*weights), moment, Integer(0, "float32", 8))
    assert float(other.qparams.scale) > 5 * float(one.qparams.scale)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_inputs(bad: float) -> None:
    x = torch.randn(64, 16)
    x[3, 5] = bad
    moment = HessianObserver()
    moment(x)
    with pytest.raises(DataError, match="the inputs of layer0 are NaN or infinite") as caught:
        round_group(layer_group(torch.randn(4, 16)), moment, ROW4)
    assert "\n" not in str(caught.value)


def test_a_layer_without_calibration_inputs() -> None:
    with pytest.raises(ModelError, match="layer0 was never reached"):
        round_group(layer_group(torch.randn(4, 16)), HessianObserver(), ROW4)


@pytest.mark.parametrize("sequential", [False, True])
def test_the_method_uses_inputs_of_the_quantized_network(sequential: bool) -> None:
    """Every layer equals `gptq` on the Hessian of the inputs it then receives."""
    model = Model(BUILDS["llama"]())
    batches = [inputs("llama", seed=seed) for seed in range(4)]
    full = {path: module.weight.detach().clone() for path, module in model.network.named_modules() if "proj" in path}
    settings = {"method": "gptq", "group_size": 16, "bits": 3, "sequential": sequential}
    METHODS.build(settings).apply(model, MethodContext(batches=batches))
    layers = quantized_layers(model.network)
    moments = {path: HessianObserver() for path in layers}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, moment=moments[path]: moment(args[0].flatten(0, -2)))
        for path, layer in layers.items()
    ]
    with torch.no_grad():
        for batch in batches:
            model.network(**batch)
    for hook in hooks:
        hook.remove()
    number_format = Integer(16, "float16", 3, symmetric=False)
    for group in (group for block in anatomy_of(BUILDS["llama"]()).blocks for group in layer_groups(block)):
        reads_rounded = sequential or (group.is_input_group and group.part.kind == "heads")
        for layer in group.layers:
            expected = gptq(full[layer.path], moments[layer.path].matrix, number_format)  # type: ignore[arg-type]
            same = (layers[layer.path].packed.unpack().codes == expected.codes).float().mean()
            assert same > 0.99 if reads_rounded else same < 1
