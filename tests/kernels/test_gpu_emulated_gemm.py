"""Emulated accumulation in Triton, bit-identical to the reference."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (chooses the interpreter)
from smelt.kernels.dispatch import GPU, use_backend
from smelt.kernels.emulated_gemm import emulated_matmul, select_backend
from smelt.kernels.gpu import emulated_gemm as kernel
from smelt.numerics.float_format import DLFLOAT16, FP8_E4M3, FP8_E5M2_IBM, ROUNDINGS, FloatFormat, Rounding
from tests.kernels.emulated_operands import assert_same_bits, difficult_operands, with_kernel

CASES = [
    (DLFLOAT16, True),
    (FloatFormat(5, 10), False),
    (FloatFormat(8, 5), True),
    (FloatFormat(3, 2, subnormals=False), False),
]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("accumulator", "saturate"), CASES, ids=str)
def test_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, accumulator: FloatFormat, saturate: bool, rounding: Rounding
) -> None:
    """On a device that one program keeps busy, and on one on which programs share out the chunks, two at a time."""
    a, b = difficult_operands(rows=6, length=9, columns=66, device=DEVICE)
    monkeypatch.setattr(kernel, "_WORKSPACE", 2 * 6 * 66)
    for operands in (None, FP8_E5M2_IBM) if rounding == "nearest" else (None,):
        settings: dict[str, Any] = {"operands": operands, "saturate": saturate, "seed": 2**40 + 3}
        with use_backend("reference"):
            expected = emulated_matmul(a, b, accumulator, 4, rounding, **settings)
        for programs in (0, 1000):
            with with_kernel(monkeypatch, partial(kernel.emulated_matmul, programs=programs)):
                actual = emulated_matmul(a, b, accumulator, 4, rounding, **settings)
            assert_same_bits(actual, expected)


@pytest.mark.parametrize(
    "number_format", [FP8_E5M2_IBM, DLFLOAT16, FP8_E4M3, FloatFormat(3, 2, subnormals=False)], ids=str
)
def test_rounding_bit_for_bit(number_format: FloatFormat) -> None:
    """Values of all magnitudes, ties, both zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2000, generator=generator) * torch.exp2(40 * torch.randn(2000, generator=generator))
    ties = torch.arange(-64, 64) * number_format.min_positive / 4
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-40, number_format.max_value])
    x = torch.cat([values, ties, special]).to(DEVICE)
    assert kernel.can_round(number_format) and not kernel.can_round(FloatFormat(8, 7))
    assert_same_bits(kernel.round_to(x, number_format), number_format.round(x))


def test_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    with with_kernel(monkeypatch, kernel.emulated_matmul):
        for rows, length, columns in ((0, 3, 2), (2, 0, 3), (2, 3, 0)):
            a, b = torch.ones(rows, length, device=DEVICE), torch.ones(length, columns, device=DEVICE)
            assert torch.equal(emulated_matmul(a, b, DLFLOAT16), torch.zeros(rows, columns, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("operands", [None, FP8_E5M2_IBM], ids=str)
def test_a_gpu_uses_the_kernel(rounding: Rounding, operands: FloatFormat | None) -> None:
    for rows, length, columns, chunk in ((70, 200, 130, 64), (16, 2000, 144, None), (2048, 150, 700, 64)):
        a, b = difficult_operands(rows, length, columns, device="cuda")
        assert select_backend(a) == GPU
        actual = emulated_matmul(a, b, DLFLOAT16, chunk, rounding, operands=operands)
        with use_backend("reference"):
            expected = emulated_matmul(a, b, DLFLOAT16, chunk, rounding, operands=operands)
        assert_same_bits(actual, expected)
        assert math.isfinite(float(actual[8:].sum()))


def test_the_tile_follows_the_shape() -> None:
    """264 programs keep an H200 busy: a convolution of 128 images of 32x32 pixels, and its weight gradient."""
    assert kernel.tile_for(131_072, 16, chunks=3, programs=264) == (128, 16, 8, False)
    assert kernel.tile_for(16, 144, chunks=2048, programs=264) == (16, 64, 4, True)
    assert kernel.tile_for(16, 144, chunks=1, programs=264) == (2, 64, 4, False)
    assert kernel.tile_for(1, 1, chunks=1, programs=264) == (1, 1, 1, False)
