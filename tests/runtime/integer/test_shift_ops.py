"""GELU, softmax and LayerNorm by shifts against Python's integers and against float, at scales from 1e-6 to 1."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from smelt.errors import ConversionError
from smelt.runtime.integer import ops
from smelt.runtime.integer.constants import norm_constants
from smelt.runtime.integer.shift_constants import (
    gelu_shift_constants,
    shift_exp_constants,
    softmax_shift_constants,
)
from smelt.runtime.integer.shift_ops import SQRT_ITERATIONS, shift_exp, shift_sqrt

SCALES = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]


def exp_of(x: int, q_one: int, max_halvings: int, lift: int, drop: int) -> int:
    """ShiftExp with integers of any size and floor division instead of shifts."""
    power = max(x + x // 2 - x // 16, -max_halvings * q_one)
    halvings, rest = divmod(-power, q_one)
    return ((-rest // 2 + q_one) * 2**lift) // 2 ** (drop + halvings)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bits", [12, 20])
def test_shift_exp_is_that_of_large_integers(scale: float, bits: int) -> None:
    constants = shift_exp_constants(scale, bits, "layer")
    generator = torch.Generator().manual_seed(bits)
    x = -(torch.rand(300, generator=generator) ** 4 * 40 / scale).round().long()
    x[:5] = torch.tensor([0, -1, -2, -16, -17])
    assert shift_exp(x, **constants).tolist() == [exp_of(value, **constants) for value in x.tolist()]
    assert int(shift_exp(torch.zeros(1, dtype=torch.int64), **constants)).bit_length() == bits


@pytest.mark.parametrize("scale", [1e-5, 1e-3])
def test_error_of_shift_exp(scale: float) -> None:
    """A line instead of 2**f is up to 0.043 above it, and 1.4375 instead of log2(e) a little more."""
    constants = shift_exp_constants(scale, 20, "layer")
    x = torch.linspace(-12, 0, 4000, dtype=torch.float64)
    result = shift_exp((x / scale).round().long(), **constants).double()
    result /= float(shift_exp(torch.zeros(1, dtype=torch.int64), **constants))
    error = result - x.exp()
    assert 0.04 < float(error.max()) < 0.05
    assert float(error.min()) > -1e-3


@pytest.mark.parametrize("scale", SCALES)
def test_gelu_is_that_of_large_integers(scale: float) -> None:
    limit = min(2**15 - 1, math.ceil(12 / scale))
    attributes, output_scale = gelu_shift_constants(scale, limit, "layer")
    bits = attributes["sigmoid_bits"]
    exp_constants = {name: value for name, value in attributes.items() if name != "sigmoid_bits"}
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-limit, limit + 1, (300,), generator=generator, dtype=torch.int32)
    x[:4] = torch.tensor([0, -1, limit, -limit])
    expected = []
    for value in x.tolist():
        scaled = value + value // 2 + value // 8 + value // 16
        exp, one = exp_of(-abs(scaled), **exp_constants), exp_of(0, **exp_constants)
        expected.append(value * ((exp if scaled < 0 else one) * 2**bits // (one + exp)))
    assert ops.OPERATORS["gelu_shift"](x, **attributes).tolist() == expected
    assert max(map(abs, expected)) < 2**31
    assert output_scale == scale / 2**bits


def test_error_of_gelu() -> None:
    """The sigmoid form alone is off by 0.020; the line instead of 2**f adds to it."""
    scale = 8 / 32767
    attributes, output_scale = gelu_shift_constants(scale, 32767, "layer")
    q = torch.arange(-32767, 32768)
    error = ops.OPERATORS["gelu_shift"](q, **attributes).double() * output_scale - F.gelu(q.double() * scale)
    assert 0.02 < float(error.abs().max()) < 0.04


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2])  # at coarser scales the shifts drop most bits of a score
@pytest.mark.parametrize("length", [1, 5, 128])
def test_softmax(scale: float, length: int) -> None:
    """Within 3 points of float64, apart from half a step of the output; rows sum to one within rounding."""
    generator = torch.Generator().manual_seed(length)
    x = (torch.randn(40, length, generator=generator) * 2 / scale).round().to(torch.int32)
    levels = 2**11
    attributes, output_scale = softmax_shift_constants(scale, length, "layer", levels=levels)
    result = ops.OPERATORS["softmax_shift"](x, **attributes).double() * output_scale
    expected = (x.double() * scale).softmax(-1)
    assert float((result - expected).abs().max()) < 0.03 + 0.5 / levels
    assert float((result.sum(-1) - 1).abs().max()) < 1e-3 + length * 0.5 / levels
    assert int((result / output_scale).max()) <= levels


def test_masked_positions_have_no_probability() -> None:
    x = torch.tensor([[100, 900, -50], [5, 6, 7]], dtype=torch.int32)
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    attributes, scale = softmax_shift_constants(0.01, 3, "layer")
    result = ops.OPERATORS["softmax_shift"](x, mask, **attributes)
    assert result[:, 1].tolist() == [0, 0]
    assert result[1].tolist() == [0, 0, 0]
    expected = torch.tensor([100.0, -50.0]).mul(0.01).softmax(-1).double()
    assert torch.allclose(result[0, [0, 2]].double() * scale, expected, atol=0.03)


def test_square_root_is_the_floor_or_one_more() -> None:
    values = [0, 1, 2, 3, 4, 8, 15, 16, 24, 2**31 - 1, 2**32, 2**60 - 1, 2**60]
    generator = torch.Generator().manual_seed(0)
    values += (2 ** (torch.rand(500, generator=generator, dtype=torch.float64) * 60)).long().tolist()
    roots = shift_sqrt(torch.tensor(values)).tolist()
    assert all(0 <= root - math.isqrt(value) <= 1 for value, root in zip(values, roots, strict=True))
    assert [root for value, root in zip(values, roots, strict=True) if math.isqrt(value) ** 2 == value][:3] == [0, 1, 2]
    assert SQRT_ITERATIONS == 10  # of the paper


@pytest.mark.parametrize("scale", [1e-5, 1e-3])
def test_layer_norm(scale: float) -> None:
    """With an outlier channel; one unit of the root is far below the rounding of the weights."""
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(30, 384, generator=generator).double()
    real[:, 7] *= 40
    x = (real / scale).round().long()
    weight, bias = torch.randn(384, generator=generator), torch.randn(384, generator=generator)
    attributes, constants, output_scale = norm_constants(scale, int(x.abs().max()), weight, bias, 1e-12, "layer")
    result = ops.OPERATORS["layer_norm_shift"](x, **attributes, **constants).double() * output_scale
    expected = F.layer_norm(x.double() * scale, (384,), weight.double(), bias.double(), 1e-12)
    assert float((result - expected).square().mean().sqrt()) < 1e-3
    newton = ops.OPERATORS["layer_norm"](x, **attributes, **constants).double() * output_scale
    assert float((result - newton).abs().max()) < 1e-2


def test_the_mean_of_layer_norm_is_rounded_half_up() -> None:
    x = torch.tensor([[1, 2], [-2, -1], [0, 2]])  # the means are 1.5, -1.5 and 1
    weight, bias = torch.ones(2, dtype=torch.int32), torch.tensor([0, 7], dtype=torch.int32)
    constants = {"weight": weight, "bias": bias, "epsilon": 0, "shift": 0, "reciprocal_bits": 30, "output_bits": 8}
    result = ops.OPERATORS["layer_norm_shift"](x, **constants)
    assert result[:2].tolist() == [[-256, 7], [-256, 7]]
    assert result[2, 0] == -(result[2, 1] - 7) < 0


def test_refusals_name_the_layer() -> None:
    for scale in (1e-10, 1.5):
        with pytest.raises(ConversionError, match=r"encoder\.0.*between 1e-9 and 1"):
            softmax_shift_constants(scale, 8, "encoder.0")
    with pytest.raises(ConversionError, match=r"encoder\.0.*16 bits"):
        gelu_shift_constants(0.01, 2**25, "encoder.0")
    with pytest.raises(ConversionError, match=r"encoder\.0.*shorten"):
        softmax_shift_constants(0.01, 2**23, "encoder.0")
