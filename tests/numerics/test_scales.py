"""Scales: the OCP rule by brute force, its rounding-up variant, how each dtype is stored, NVFP4's two levels."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smelt.numerics import get_format
from smelt.numerics.scales import (
    FLOAT_SCALES,
    POWER_OF_TWO_SCALES,
    STORED_BITS,
    ScaleDtype,
    load_scale,
    round_scale,
    store_scale,
)

TOP = {"mxfp4": 2, "mxfp6-e2m3": 2, "mxfp6-e3m2": 4, "mxfp8-e4m3": 8, "mxfp8-e5m2": 15, "mxint8": 0, "mxint4": 0}
POSITIVE = st.floats(2.0**-149, torch.finfo(torch.float32).max, width=32)


def floor_log2(value: float) -> int:
    """Return the largest n with 2^n <= value, by comparing exact fractions."""
    exact, n = Fraction(value), -150
    while Fraction(2) ** (n + 1) <= exact:
        n += 1
    return n


def scale_of(name: str, largest: float) -> float:
    number_format = get_format(name)
    return float(
        number_format.compute_qparams(number_format.split_groups(torch.tensor([[largest, -largest / 2]]))).scale
    )


@pytest.mark.parametrize("name", TOP)
@pytest.mark.parametrize("exponent", [-100, -20, -1, 0, 1, 5, 100])
def test_at_powers_of_two_and_just_below(name: str, exponent: int) -> None:
    power = 2.0**exponent
    below = float(torch.nextafter(torch.tensor(power), torch.tensor(0.0)))
    above = float(torch.nextafter(torch.tensor(power), torch.tensor(math.inf)))
    assert scale_of(name, power) == scale_of(name, above) == 2.0 ** (exponent - TOP[name])
    assert scale_of(name, below) == 2.0 ** (exponent - 1 - TOP[name])


@given(POSITIVE, st.sampled_from(sorted(TOP)))
def test_the_ocp_rule_by_brute_force(largest: float, name: str) -> None:
    exponent = max(-127, min(127, floor_log2(largest) - TOP[name]))
    assert scale_of(name, largest) == 2.0**exponent


@given(POSITIVE)
def test_rounding_up_from_seven_quarters(largest: float) -> None:
    exponent = floor_log2(largest)
    carried = exponent + (Fraction(largest) >= Fraction(7, 4) * Fraction(2) ** exponent)
    assert scale_of("mxfp4-up", largest) == 2.0 ** max(-127, min(127, carried - 2))


def test_seven_quarters_itself_is_rounded_up() -> None:
    assert scale_of("mxfp4-up", 7.0) == 2.0 and scale_of("mxfp4", 7.0) == 1.0
    assert scale_of("mxfp4-up", float(torch.nextafter(torch.tensor(7.0), torch.tensor(0.0)))) == 1.0


def test_the_largest_power_is_not_exceeded() -> None:
    """The next byte would be NaN."""
    assert scale_of("mxint8@e8m0-up", 3.4e38) == 2.0**127


def test_every_byte_of_e8m0() -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    scale = load_scale(stored, "e8m0")
    assert scale[:-1].tolist() == [2.0 ** (byte - 127) for byte in range(255)] and math.isnan(float(scale[-1]))
    assert torch.equal(store_scale(scale, "e8m0"), stored)


@pytest.mark.parametrize("kind", FLOAT_SCALES)
def test_a_rounded_scale_is_stored_without_loss(kind: ScaleDtype) -> None:
    exact = torch.cat([torch.exp2(120 * torch.randn(2000)), torch.tensor([0.0, 1e-45, 3.4e38, math.inf, math.nan])])
    rounded = round_scale(exact, kind)
    stored = store_scale(rounded, kind)
    assert stored.element_size() * 8 == STORED_BITS[kind]
    assert torch.equal(load_scale(stored, kind).nan_to_num(nan=-1), rounded.nan_to_num(nan=-1))
    assert torch.equal(rounded.isnan(), exact.isnan()) and bool(
        (rounded[:-1] > 0).all() & rounded[:-1].isfinite().all()
    )


@pytest.mark.parametrize("kind", FLOAT_SCALES)
def test_a_scale_is_rounded_to_the_nearest(kind: ScaleDtype) -> None:
    exact = 0.1 + torch.rand(2000)
    bits = {"float32": 23, "float16": 10, "bfloat16": 7, "e4m3": 3, "e5m2": 2}[kind]
    step = torch.exp2(torch.floor(torch.log2(exact)) - bits)
    assert torch.equal(round_scale(exact, kind), (exact / step).round() * step)


def test_every_scale_dtype_is_either_rounded_or_a_power_of_two() -> None:
    assert set(FLOAT_SCALES) | set(POWER_OF_TWO_SCALES) == set(get_args(ScaleDtype)) == set(STORED_BITS)


def test_the_two_levels_of_nvfp4() -> None:
    """By hand from the rule: G = 448 * 6 / amax of the tensor; a group's scale is E4M3(G * its amax / 6)."""
    x = torch.randn(8, 64) * torch.logspace(-3, 2, 8)[:, None]
    number_format = get_format("nvfp4")
    qparams = number_format.quantize(x).qparams
    assert qparams.tensor is not None and qparams.tensor.shape == (1, 1, 1) and qparams.scale.shape == (8, 4, 1)
    tensor_scale = 448 * 6 / x.abs().max()
    assert torch.equal(qparams.tensor.flatten(), tensor_scale.reshape(1))
    by_hand = (x.reshape(8, 4, 16).abs().amax(-1, keepdim=True) * tensor_scale / 6).to(torch.float8_e4m3fn).float()
    assert torch.equal(qparams.scale, by_hand.clamp(min=2.0**-9)) and float(qparams.scale.max()) == 448
    stored = number_format.store_qparams(qparams)
    assert (stored["scale"].dtype, stored["tensor"].dtype) == (torch.float8_e4m3fn, torch.float32)
    values = number_format.quantize(x).dequantize().reshape(8, 4, 16) / (qparams.scale / tensor_scale)
    assert set(values.abs().round(decimals=4).unique().tolist()) <= {0, 0.5, 1, 1.5, 2, 3, 4, 6}


def test_nvfp4_of_tiny_values() -> None:
    """The per-tensor scale stays finite, and the values survive."""
    x = torch.randn(4, 32) * 1e-37
    quantized = get_format("nvfp4").quantize(x)
    assert quantized.qparams.tensor is not None and bool(quantized.qparams.tensor.isfinite().all())
    assert float((quantized.dequantize() - x).abs().max()) < 0.2 * float(x.abs().max())


@pytest.mark.parametrize("kind", FLOAT_SCALES)
@pytest.mark.parametrize("slope", [1e-9, 1.0, 1e9])
def test_gradients_pass_a_rounded_scale_unchanged(kind: ScaleDtype, slope: float) -> None:
    """A conversion to float16 would round the gradient too: 1e9 would become infinite, 1e-9 zero."""
    scale = torch.tensor([0.37, 1.93], requires_grad=True)
    (round_scale(scale, kind) * slope).sum().backward()
    assert scale.grad is not None and torch.equal(scale.grad, torch.full((2,), slope))
    assert torch.equal(round_scale(scale, kind), round_scale(scale.detach(), kind))
