"""Dequantize every 8-bit and 4-bit code, in float32 and in half precision, where four are converted at a time."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, HALF

import triton  # isort: skip
import triton.language as tl  # isort: skip

from smelt.kernels.gpu.codes import e4m3_numbers, half_values, int8_values  # isort: skip

TYPES = [torch.float32, HALF]


@triton.jit
def byte_kernel(octets, numbers, EIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Dequantize all bytes."""
    offsets = tl.arange(0, 256)[None, :]
    codes = tl.load(octets + offsets)
    DTYPE: tl.constexpr = numbers.dtype.element_ty
    tl.store(numbers + offsets, int8_values(codes, DTYPE) if EIGHT else e4m3_numbers(codes, DTYPE))


@triton.jit
def halves_kernel(octets, numbers):  # type: ignore[no-untyped-def]
    """Dequantize both halves of all bytes minus every zero point: [16, 2, 256]"""
    row, offsets = tl.arange(0, 16)[:, None], tl.arange(0, 256)[None, :]
    codes = tl.load(octets + row * 0 + offsets)
    low, high = half_values(codes, row, numbers.dtype.element_ty)
    tl.store(numbers + row * 512 + offsets, low)
    tl.store(numbers + row * 512 + 256 + offsets, high)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_byte(kind: torch.dtype, dtype: torch.dtype) -> None:
    octets = torch.arange(256, dtype=torch.uint8)
    actual = torch.empty(256, dtype=dtype, device=DEVICE)
    byte_kernel[(1,)](octets.to(DEVICE), actual, EIGHT=kind == torch.int8)
    expected = octets.view(kind).float()
    real = ~expected.isnan()  # E4M3 has two NaN codes, which are never written
    assert torch.equal(actual.cpu().float()[real], expected[real])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_both_halves_of_every_byte_minus_every_zero_point(dtype: torch.dtype) -> None:
    octets = torch.arange(256, dtype=torch.uint8)
    actual = torch.empty(16, 2, 256, dtype=dtype, device=DEVICE)
    halves_kernel[(1,)](octets.to(DEVICE), actual)
    expected = torch.stack([octets & 15, octets >> 4]).float() - torch.arange(16.0)[:, None, None]
    assert torch.equal(actual.cpu().float(), expected)
