"""Element types: their values code by code, round to nearest even, saturation, stochastic rounding."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from smelt.numerics.elements import E2M1, E2M3, E3M2, E4M3, E5M2, TERNARY, ElementType, mx_integers, normal_floats

ALL = [
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    TERNARY,
    mx_integers(4),
    mx_integers(8),
    *(normal_floats(bits) for bits in (2, 3, 4)),
]
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
IDS = [elements.name for elements in ALL]


def finite_values(elements: ElementType) -> list[float]:
    return [value for value in elements.values if not math.isnan(value)]


def test_values_of_e2m1() -> None:
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert E2M1.values == magnitudes + tuple(-value for value in magnitudes)


def test_values_of_e2m3() -> None:
    """Steps of an eighth up to 2, a quarter up to 4, a half up to 7.5."""
    magnitudes = [k / 8 for k in range(16)] + [2 + k / 4 for k in range(8)] + [4 + k / 2 for k in range(8)]
    assert E2M3.values == (*magnitudes, *(-value for value in magnitudes))


def test_values_of_e3m2() -> None:
    """Subnormals in sixteenths, then four values in each of the seven binades from 1/4 to 28."""
    magnitudes = [k / 16 for k in range(4)] + [2.0**e * (1 + k / 4) for e in range(-2, 5) for k in range(4)]
    assert E3M2.values == (*magnitudes, *(-value for value in magnitudes)) and E3M2.max_value == 28


@pytest.mark.parametrize(("elements", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)], ids=["e4m3", "e5m2"])
def test_values_of_fp8_match_torch(elements: ElementType, largest: float) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(TORCH[elements.name]).float()
    ours = torch.tensor(elements.values)
    assert torch.equal(ours.isnan(), ~expected.isfinite())
    assert torch.equal(ours[expected.isfinite()], expected[expected.isfinite()])
    assert elements.max_value == largest and elements.min_value == -largest
    assert int(ours.isnan().sum()) == (2 if elements is E4M3 else 8)


@pytest.mark.parametrize("elements", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_rounding_to_fp8_matches_torch(elements: ElementType) -> None:
    """Every magnitude from far below the subnormals to far above the largest, every tie and its neighbors."""
    values = torch.tensor(sorted(set(finite_values(elements))))
    ties = (values[1:] + values[:-1]) / 2
    around = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-math.inf, math.inf)]
    wide = torch.randn(200_000) * torch.exp2(torch.randint(-24, 20, (200_000,)).float())
    x = torch.cat([wide, ties, *around, values, torch.tensor([1e30, -1e30, math.inf, -math.inf])])
    expected = x.clamp(elements.min_value, elements.max_value).to(TORCH[elements.name]).float()
    assert torch.equal(elements.decode(elements.encode(x)), expected)


@pytest.mark.parametrize(
    ("x", "expected"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (7, 6), (1e9, 6)]
)
def test_ties_of_e2m1_round_to_the_even_code(x: float, expected: float) -> None:
    assert E2M1.decode(E2M1.encode(torch.tensor([x, -x]))).tolist() == [expected, -expected]


def test_values_of_mx_integers() -> None:
    assert mx_integers(4).values[1:] == tuple(k / 4 for k in range(-7, 8))
    assert mx_integers(8).values[1:] == tuple(k / 64 for k in range(-127, 128))
    assert math.isnan(mx_integers(4).values[0]) and math.isnan(mx_integers(8).values[0])


def test_values_of_normal_floats() -> None:
    four = (
        -1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0,
        0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1,
    )  # fmt: skip
    assert normal_floats(4).values == pytest.approx(four, abs=1e-6)
    three = (-1, -0.4786292, -0.2171418, 0, 0.1609302, 0.3379152, 0.5626170, 1)
    assert normal_floats(3).values == pytest.approx(three, abs=1e-6)
    assert normal_floats(2).values == pytest.approx((-1, 0, 0.3379152, 1), abs=1e-6)


@pytest.mark.parametrize("elements", ALL, ids=IDS)
def test_values_round_to_the_nearest_code(elements: ElementType) -> None:
    """Against all values in float64, also right next to each midpoint, where the nearer value must win."""
    values = torch.tensor(sorted(set(finite_values(elements))), dtype=torch.float64).float().double()
    middles = ((values[1:] + values[:-1]) / 2).float()
    beside = [torch.nextafter(middles, torch.full_like(middles, end)) for end in (-math.inf, math.inf)]
    x = torch.cat([2 * elements.max_value * torch.rand(5000) - elements.max_value, middles, *beside])
    error = (elements.decode(elements.encode(x)).double() - x.double()).abs()
    assert torch.equal(error, (x.double()[:, None] - values).abs().amin(1))


@pytest.mark.parametrize("elements", ALL, ids=IDS)
def test_representable_values_stay_and_unused_codes_never_occur(elements: ElementType) -> None:
    values = torch.tensor(finite_values(elements))
    extremes = torch.tensor([math.inf, -math.inf, 3e38, -3e38, 1e-45, -1e-45, 0.0, -0.0])
    codes = elements.encode(torch.cat([values, extremes]))
    assert torch.equal(elements.decode(codes[: len(values)]), values)
    assert elements.decode(codes)[len(values) :].tolist() == [elements.max_value, elements.min_value] * 2 + [0.0] * 4


@pytest.mark.parametrize("elements", ALL, ids=IDS)
def test_stochastic_rounding_is_unbiased_and_lands_on_neighbors(elements: ElementType) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.tensor(sorted(set(finite_values(elements))))
    draws = 4000
    x = elements.min_value + (elements.max_value - elements.min_value) * torch.rand(64)
    rounded = elements.decode(elements.encode_stochastic(x.expand(draws, -1), generator))
    above = torch.bucketize(x, values).clamp(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    assert bool(((rounded == low) | (rounded == high)).all())
    deviation = (rounded.mean(0) - x) / ((high - x) * (x - low)).sqrt().clamp(min=1e-6) * draws**0.5
    assert float(deviation.abs().max()) < 4.5  # standard deviations of the mean


def test_stochastic_rounding_keeps_representable_values_and_saturates() -> None:
    x = torch.tensor([*finite_values(E2M1), 7.0, -math.inf])
    assert E2M1.decode(E2M1.encode_stochastic(x)).tolist() == [*finite_values(E2M1), 6.0, -6.0]


def test_element_types_compare_by_name() -> None:
    """NaN equals nothing, so comparing values would make a copy from another process a different type."""
    assert len({elements.name for elements in ALL}) == len(ALL)
    for elements in ALL:
        assert pickle.loads(pickle.dumps(elements)) == elements  # noqa: S301  (our own bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_tables_do_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    reference = normal_floats(4)
    fresh = ElementType("fresh" + str(dtype), 4, reference.values)  # without cached tables
    x = 2 * torch.rand(100_000) - 1
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        codes = fresh.encode(x)
        random = fresh.encode_stochastic(x)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(codes, reference.encode(x))
    assert float((fresh.decode(random) - x).abs().max()) < 0.31  # the widest gap
