"""Operands on which two emulations of an accumulator differ if anything does, and their comparison bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


def difficult_operands(rows: int, length: int, columns: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return operands of many magnitudes, ties, sums that cancel, zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(rows * 10007 + length * 101 + columns)
    a = torch.randn(rows, length, generator=generator) * torch.exp(6 * torch.randn(rows, length, generator=generator))
    b = torch.randn(length, columns, generator=generator)
    if rows > 5 and length > 6:
        a[0, 2], a[1, 3], a[2, 4] = math.inf, math.nan, -math.inf
        a[3] = torch.tensor([1.0, 2.0**-6, 2.0**-11]).repeat(length)[:length]  # ties
        a[4, 1::2] = -a[4, :-1:2][: len(a[4, 1::2])]  # cancels where b is constant
        a[5] = 2.0**-20  # far below everything, and below the smallest values of narrow formats
        a[0, 0], a[1, 1] = 0.0, -0.0
        b[:, 0] = 1.0
        b[:, 1] = -(2.0**-13)
    return a.to(device), b.to(device)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    difference = actual.masked_fill(actual.isnan(), 0.0), expected.masked_fill(expected.isnan(), 0.0)
    assert torch.equal(*(tensor.view(torch.int32) for tensor in difference))


@contextmanager
def with_kernel(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> Iterator[None]:
    """Make `emulated_matmul` use a kernel on any device."""
    with monkeypatch.context() as patch:
        patch.setattr("smelt.kernels.emulated_gemm._kernel", lambda x: kernel)
        yield
