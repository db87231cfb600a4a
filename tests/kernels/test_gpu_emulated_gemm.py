"""Emulated accumulation in Triton, bit-identical to the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (chooses the interpreter)
from smelt.kernels.dispatch import GPU, use_backend
from smelt.kernels.emulated_gemm import emulated_matmul, select_backend
from smelt.kernels.gpu import emulated_gemm as kernel
from smelt.numerics.float_format import DLFLOAT16, FP8_E5M2_IBM, ROUNDINGS, FloatFormat, Rounding
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
    a, b = difficult_operands(rows=6, length=9, columns=5, device=DEVICE)
    for operands in (None, FP8_E5M2_IBM) if rounding == "nearest" else (None,):
        settings: dict[str, Any] = {"operands": operands, "saturate": saturate, "seed": 2**40 + 3}
        with use_backend("reference"):
            expected = emulated_matmul(a, b, accumulator, 4, rounding, **settings)
        with with_kernel(monkeypatch, lambda *args: kernel.emulated_matmul(*args, tile=(4, 8), num_warps=1)):
            actual = emulated_matmul(a, b, accumulator, 4, rounding, **settings)
        assert_same_bits(actual, expected)


def test_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    with with_kernel(monkeypatch, kernel.emulated_matmul):
        for rows, length, columns in ((0, 3, 2), (2, 0, 3), (2, 3, 0)):
            a, b = torch.ones(rows, length, device=DEVICE), torch.ones(length, columns, device=DEVICE)
            assert torch.equal(emulated_matmul(a, b, DLFLOAT16), torch.zeros(rows, columns, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("operands", [None, FP8_E5M2_IBM], ids=str)
def test_a_gpu_uses_the_kernel(rounding: Rounding, operands: FloatFormat | None) -> None:
    a, b = difficult_operands(rows=70, length=200, columns=130, device="cuda")
    assert select_backend(a) == GPU
    actual = emulated_matmul(a, b, DLFLOAT16, 64, rounding, operands=operands)
    with use_backend("reference"):
        expected = emulated_matmul(a, b, DLFLOAT16, 64, rounding, operands=operands)
    assert_same_bits(actual, expected)
    assert math.isfinite(float(actual[8:].sum()))
