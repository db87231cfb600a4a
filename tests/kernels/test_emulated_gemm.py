"""Emulated accumulation: against exact rational arithmetic, published behavior, and the compiled kernel bit for bit."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from smelt.errors import FormatError
from smelt.kernels.accumulation import Accumulation
from smelt.kernels.dispatch import CPU, use_backend
from smelt.kernels.emulated_gemm import emulated_matmul, emulated_sum, philox, select_backend
from smelt.numerics.float_format import (
    DLFLOAT16,
    FLOAT16,
    FP8_E4M3,
    FP8_E5M2,
    FP8_E5M2_IBM,
    ROUNDINGS,
    FloatFormat,
    Rounding,
)
from tests.kernels.emulated_operands import assert_same_bits, difficult_operands
from tests.kernels.instruction_sets import NEEDS_COMPILER as compiled

FORMATS = [
    DLFLOAT16,
    FLOAT16,
    FloatFormat(8, 5),
    FloatFormat(6, 10),
    FloatFormat(8, 23),
    FloatFormat(4, 3, special="nan"),
    FloatFormat(3, 2, subnormals=False),
]


def exact_sum(products: list[Fraction], mantissa_bits: int, rounding: str, chunk_size: int) -> Fraction:
    """Accumulate in rational arithmetic, without limits of the exponent."""
    partial = [Fraction(0)]
    for index, product in enumerate(products):
        if index and index % chunk_size == 0:
            partial.append(Fraction(0))
        partial[-1] = round_exactly(partial[-1] + product, mantissa_bits, rounding)
    total = Fraction(0)
    for value in partial:
        total = round_exactly(total + value, mantissa_bits, rounding)
    return total


def round_exactly(value: Fraction, mantissa_bits: int, rounding: str) -> Fraction:
    if value == 0:
        return value
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (exponent - mantissa_bits)
    return (round(value / step) if rounding == "nearest" else math.trunc(value / step)) * step


@pytest.mark.parametrize("backend", ["reference", pytest.param(CPU, marks=compiled)])
@pytest.mark.parametrize("rounding", ["nearest", "truncate"])
@pytest.mark.parametrize("mantissa_bits", [3, 10, 23])
def test_against_rational_arithmetic(mantissa_bits: int, rounding: Rounding, backend: str) -> None:
    """Sums with bits far below those of float64 included: rounding them to float64 first would truncate wrongly."""
    generator = torch.Generator().manual_seed(mantissa_bits)
    a = torch.randn(12, 23, generator=generator) * torch.exp(8 * torch.randn(12, 23, generator=generator))
    a[0, 1:] = -(2.0**-70)
    a[0, 0] = 1.0
    b = torch.randn(23, 1, generator=generator)
    b[:, 0] = torch.where(a[0] < 0, torch.ones(23), b[:, 0])
    for chunk_size in (None, 5):
        with use_backend(backend):
            actual = emulated_matmul(a, b, FloatFormat(8, mantissa_bits), chunk_size, rounding)
        for row in range(12):
            products = [Fraction(x) * Fraction(y) for x, y in zip(a[row].tolist(), b[:, 0].tolist(), strict=True)]
            assert Fraction(float(actual[row])) == exact_sum(products, mantissa_bits, rounding, chunk_size or 23)


@compiled
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("accumulator", FORMATS, ids=str)
def test_the_compiled_kernel_is_bit_identical(accumulator: FloatFormat, rounding: Rounding) -> None:
    """Odd shapes, several tiles, float32 and float64 arithmetic, overflow, NaN."""
    for rows, length, columns in ((6, 37, 131), (1, 1, 1), (0, 3, 2), (2, 0, 3), (2, 3, 0)):
        a, b = difficult_operands(rows, length, columns)
        for operands, saturate, chunk in ((None, True, None), (FP8_E5M2, False, 16), (FP8_E4M3, True, 1)):
            results = []
            for backend in ("reference", CPU):
                with use_backend(backend):
                    results.append(
                        emulated_matmul(
                            a, b, accumulator, chunk, rounding, operands=operands, saturate=saturate, seed=2**40 + 3
                        )
                    )
            assert results[0].shape == (rows, columns)
            assert_same_bits(results[1], results[0])


@compiled
@pytest.mark.parametrize("operands", [FP8_E5M2, FP8_E5M2_IBM, FP8_E4M3], ids=str)
@pytest.mark.parametrize("mantissa_bits", [7, 10])
def test_float32_arithmetic_is_exact(
    monkeypatch: pytest.MonkeyPatch, operands: FloatFormat, mantissa_bits: int
) -> None:
    accumulator = FloatFormat(6, mantissa_bits, special="nan", subnormals=mantissa_bits != 7)
    assert Accumulation(accumulator, 64, "nearest", True, 0, operands).float32_is_exact
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(40, 64, generator=generator) * torch.exp(3 * torch.randn(40, 64, generator=generator))
    b = torch.randn(64, 300, generator=generator) * torch.exp(3 * torch.randn(64, 300, generator=generator))
    fast = emulated_matmul(a, b, accumulator, operands=operands)
    monkeypatch.setattr(Accumulation, "float32_is_exact", False)
    assert_same_bits(fast, emulated_matmul(a, b, accumulator, operands=operands))


@pytest.mark.parametrize(
    ("operands", "accumulator", "rounding"),
    [
        (FP8_E5M2, FloatFormat(6, 11), "nearest"),  # too wide
        (DLFLOAT16, DLFLOAT16, "nearest"),  # products too wide
        (FP8_E5M2, FloatFormat(6, 4), "nearest"),  # a product may be a tie
        (FP8_E5M2, FloatFormat(8, 7), "nearest"),  # may overflow
        (FP8_E5M2, DLFLOAT16, "truncate"),
        (FP8_E5M2, DLFLOAT16, "stochastic"),
        (None, DLFLOAT16, "nearest"),
    ],
    ids=str,
)
def test_float32_arithmetic_is_not_exact(
    operands: FloatFormat | None, accumulator: FloatFormat, rounding: Rounding
) -> None:
    assert not Accumulation(accumulator, 1, rounding, True, 0, operands).float32_is_exact


@pytest.fixture(scope="module")
def positive_mean() -> torch.Tensor:
    """65,536 uniform values of mean 1 and standard deviation 1, in (1,6,9)."""
    values = 1 + math.sqrt(12) * (torch.rand(65536, generator=torch.Generator().manual_seed(0)) - 0.5)
    return DLFLOAT16.round(values)


@compiled
def test_a_long_sum_stalls_at_4096_without_chunks(positive_mean: torch.Tensor) -> None:
    """Wang et al., 2018, figure 3: a step of (1,6,9) at 4096 is 8, more than twice the largest value."""
    assert float(emulated_sum(positive_mean, DLFLOAT16)) == 4096.0
    assert float(emulated_sum(positive_mean[:30000], DLFLOAT16)) == 4096.0


@compiled
def test_relative_error_by_chunk_size(positive_mean: torch.Tensor) -> None:
    """Stalls in the outer sum with small chunks, in the inner ones with large chunks."""
    exact = float(positive_mean.double().sum())
    errors = {
        chunk: abs(float(emulated_sum(positive_mean, DLFLOAT16, chunk)) / exact - 1)
        for chunk in (4, 8, 32, 64, 256, 1024, 4096)
    }
    assert errors[4] == pytest.approx(0.81, abs=0.02)
    assert errors[8] == pytest.approx(0.75, abs=0.02)
    assert all(errors[chunk] < 0.03 for chunk in (32, 64, 256, 1024))
    assert 0.02 < errors[4096] < 0.2
    stochastic = float(emulated_sum(positive_mean, DLFLOAT16, rounding="stochastic", seed=1))
    assert abs(stochastic / exact - 1) < 0.05


@compiled
def test_stochastic_rounding_is_unbiased_and_seeded() -> None:
    x = DLFLOAT16.round(torch.rand(300, generator=torch.Generator().manual_seed(2)))
    sums = emulated_sum(x.expand(4000, 300), FloatFormat(6, 4), rounding="stochastic", seed=5).double()
    error = float(sums.std()) / math.sqrt(len(sums))
    assert abs(float(sums.mean() - x.double().sum())) < 3 * error
    again = emulated_sum(x.expand(4000, 300), FloatFormat(6, 4), rounding="stochastic", seed=5)
    other = emulated_sum(x.expand(4000, 300), FloatFormat(6, 4), rounding="stochastic", seed=6)
    assert torch.equal(sums, again.double()) and not torch.equal(again, other)


def test_philox_has_the_published_first_word() -> None:
    """Salmon et al., 2011: the known answer for counter 0 and key 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert philox(0, 0, zero, zero).tolist() == [0x6627E8D5]


def test_leading_dimensions_and_gradients() -> None:
    a, b = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    result = emulated_matmul(a, b, FloatFormat(8, 23))
    assert result.shape == (2, 3, 5) and not result.requires_grad
    torch.testing.assert_close(result, (a @ b).detach())
    assert emulated_sum(torch.randn(2, 3, 8), DLFLOAT16).shape == (2, 3)
    assert emulated_sum(torch.ones(8), DLFLOAT16).shape == ()


@compiled
def test_the_kernel_is_used() -> None:
    assert select_backend(torch.ones(1)) == CPU
    with use_backend("reference"):
        assert select_backend(torch.ones(1)) == "reference"


def test_bad_inputs() -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(FormatError, match=r"shapes \[2, 3\] and \[2, 3\] do not multiply"):
        emulated_matmul(ones, ones, DLFLOAT16)
    with pytest.raises(FormatError, match="a chunk has at least one product, not 0"):
        emulated_matmul(ones, ones.T, DLFLOAT16, 0)
    with pytest.raises(FormatError, match="no rounding 'up'"):
        emulated_matmul(ones, ones.T, DLFLOAT16, rounding="up")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="a seed is between"):
        emulated_matmul(ones, ones.T, DLFLOAT16, seed=-1)
