"""Emulated floats: every value against an exhaustive search, torch's own types, and the three roundings."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.numerics.elements import E2M1, E4M3, E5M2
from smelt.numerics.float_format import (
    BFLOAT16,
    DLFLOAT16,
    FLOAT16,
    FP8_E4M3,
    FP8_E5M2,
    FP8_E5M2_IBM,
    FloatFormat,
    Rounding,
)

SMALL = [
    FP8_E4M3,
    FP8_E5M2,
    FP8_E5M2_IBM,
    FloatFormat(2, 1, special="none"),
    FloatFormat(4, 3, subnormals=False, special="nan"),
    FloatFormat(3, 1, subnormals=False, special="none"),
    FloatFormat(5, 2, bias=20),
]


def grid(float_format: FloatFormat) -> Tensor:
    """The finite magnitudes, ascending: the index is the code, so that ties go to the even one."""
    codes = range(1 << (float_format.exponent_bits + float_format.mantissa_bits))
    values = torch.tensor([float_format.value(code) for code in codes], dtype=torch.float64)
    finite = values[~values.isnan()]
    assert torch.equal(finite, finite.sort().values)
    return finite


def probes(float_format: FloatFormat) -> Tensor:
    """All values, all midpoints, their float64 neighbors, and values beyond both ends."""
    values = grid(float_format)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, values[-1:] * 1.01, values[1:2] / 3])
    up, down = (torch.nextafter(points, torch.full_like(points, end)) for end in (math.inf, -math.inf))
    return torch.cat([points, up, down]).abs()


@pytest.mark.parametrize("float_format", SMALL, ids=str)
def test_nearest_and_truncate_against_an_exhaustive_search(float_format: FloatFormat) -> None:
    values, x = grid(float_format), probes(float_format)
    distance = (values - x[:, None]).abs()
    is_nearest = distance == distance.amin(1, keepdim=True)
    is_odd = torch.arange(len(values)) % 2
    nearest = values[(is_odd + 2 * ~is_nearest).argmin(1)]
    below = values[(values <= x[:, None]).sum(1) - 1]
    for sign in (1.0, -1.0):
        assert torch.equal(float_format.round(sign * x), sign * nearest)
        assert torch.equal(float_format.round(sign * x, "truncate"), sign * below)


@pytest.mark.parametrize(("float_format", "dtype"), [(FLOAT16, torch.float16), (BFLOAT16, torch.bfloat16)], ids=str)
def test_equal_to_the_types_of_torch(float_format: FloatFormat, dtype: torch.dtype) -> None:
    x = torch.randn(20_000) * torch.exp(8 * torch.randn(20_000))
    x = torch.cat([x, torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-45, 65520.0, 65519.9, 3.4e38])])
    rounded, expected = float_format.round(x, saturate=False), x.to(dtype).float()
    assert torch.equal(rounded.view(torch.int32), expected.view(torch.int32))  # the signs of zeros, too


@pytest.mark.parametrize(("float_format", "elements"), [(FP8_E4M3, E4M3), (FP8_E5M2, E5M2), (SMALL[3], E2M1)], ids=str)
def test_equal_to_the_element_tables(float_format: FloatFormat, elements: object) -> None:
    x = torch.randn(5000) * torch.exp(4 * torch.randn(5000))
    assert torch.equal(float_format.round(x), elements.decode(elements.encode(x)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("float_format", [*SMALL, FLOAT16, BFLOAT16, DLFLOAT16, FloatFormat(2, 1, bias=-30)], ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "truncate", "stochastic"])
def test_float32_is_rounded_like_float64(float_format: FloatFormat, rounding: Rounding) -> None:
    x = torch.randn(5000) * torch.exp(12 * torch.randn(5000))
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1e-45, 3.4e38, math.inf, -math.inf]), torch.nextafter(x, x + 1)])
    uniform = torch.rand(x.shape) if rounding == "stochastic" else None
    for saturate in (True, False):
        wide = None if uniform is None else uniform.double()
        expected = float_format.round(x.double(), rounding, saturate=saturate, uniform=wide).float()
        actual = float_format.round(x, rounding, saturate=saturate, uniform=uniform)
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(1.0).view(torch.int32), expected.nan_to_num(1.0).view(torch.int32))


def test_ranges() -> None:
    """The largest values as published; DLFloat16 (Agrawal et al., 2019) has 2^33 - 2^24 and 2^-31 + 2^-40."""
    assert (FP8_E4M3.max_value, FP8_E5M2.max_value, FP8_E5M2_IBM.max_value) == (448.0, 57344.0, 98304.0)
    assert (FP8_E4M3.min_positive, FP8_E5M2.min_positive) == (2.0**-9, 2.0**-16)
    assert (DLFLOAT16.max_value, DLFLOAT16.min_positive) == (2.0**33 - 2.0**24, 2.0**-31 + 2.0**-40)


def test_overflow() -> None:
    x = torch.tensor([1e6, -1e6, math.inf, -math.inf, math.nan])
    assert FP8_E5M2.round(x)[:4].tolist() == [57344.0, -57344.0, 57344.0, -57344.0]
    assert FP8_E5M2.round(x, saturate=False)[:4].tolist() == [math.inf, -math.inf, math.inf, -math.inf]
    assert FP8_E5M2.round(x, "truncate", saturate=False)[:4].tolist() == [57344.0, -57344.0, math.inf, -math.inf]
    assert FP8_E4M3.round(x, saturate=False).isnan().all()
    assert SMALL[3].round(x, saturate=False)[:4].tolist() == [6.0, -6.0, 6.0, -6.0]
    assert all(FP8_E5M2.round(x, saturate=saturate)[4].isnan() for saturate in (True, False))


@pytest.mark.parametrize("float_format", [FP8_E5M2, DLFLOAT16, FloatFormat(4, 3, subnormals=False)], ids=str)
@pytest.mark.parametrize("position", [0.3, 1.3, 77.7])
def test_stochastic_rounding_is_unbiased(float_format: FloatFormat, position: float) -> None:
    """The mean of 1e5 roundings is within 3 standard errors of the value, also below the smallest one."""
    value = position * float_format.min_positive
    rounded = float_format.round(
        torch.full((100_000,), -value), "stochastic", generator=torch.Generator().manual_seed(1)
    )
    levels = rounded.unique().tolist()
    assert len(levels) == 2 and levels[0] < -value < levels[1]
    error = rounded.double().std() / math.sqrt(len(rounded))
    assert abs(rounded.double().mean() + value) < 3 * error


def test_stochastic_rounding_keeps_values_of_the_grid() -> None:
    values = grid(FP8_E4M3)
    assert torch.equal(FP8_E4M3.round(values, "stochastic"), values)


def test_results_are_float32_and_float64_stays() -> None:
    assert FP8_E5M2.round(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
    assert FP8_E5M2.round(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


def test_bad_formats_and_roundings() -> None:
    with pytest.raises(FormatError, match="2 to 8 exponent and 1 to 23 mantissa bits, not 9 and 2"):
        FloatFormat(9, 2)
    with pytest.raises(FormatError, match="not 4 and 0"):
        FloatFormat(4, 0)
    with pytest.raises(FormatError, match="out of the range of float32"):
        FloatFormat(8, 3, bias=0)
    with pytest.raises(FormatError, match="no rounding 'up'; use nearest, stochastic or truncate"):
        FP8_E4M3.round(torch.ones(1), "up")  # type: ignore[arg-type]
