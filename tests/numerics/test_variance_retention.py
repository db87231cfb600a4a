"""VRR: the published formula term by term, checked values, the solver's table, and simulated sums."""

from __future__ import annotations

import math

import pytest
import torch

from smelt.errors import ConfigError
from smelt.kernels.emulated_gemm import emulated_sum
from smelt.numerics.float_format import FP8_E5M2, FloatFormat
from smelt.numerics.variance_retention import (
    log_variance_lost,
    min_accumulator_bits,
    variance_retention_ratio,
)

LENGTHS = (144, 576, 1152, 2304, 4608, 25_088, 131_072, 802_816, 3_211_264)


def plain_formula(m_acc: int, m_p: int, n: int) -> float:
    """Theorem 1 of the paper as it is written, term by term."""

    def tail(x: float) -> float:
        return 0.5 * math.erfc(x / math.sqrt(2))

    def alpha(stages: int) -> float:
        return 2.0 ** (m_acc - 3 * m_p) / 3 * sum(2**j * (2**j - 1) * (2 ** (j + 1) - 1) for j in range(1, stages + 1))

    a, all_stages = 2.0**m_acc, alpha(m_p)
    full = {i: 2 * tail(a / math.sqrt(i)) * (1 - 2 * tail(a / math.sqrt(i - 1))) for i in range(2, n) if i > all_stages}
    partial = {
        r: 2 ** (m_acc - m_p + r)
        * 2 * tail(2 ** (m_acc - m_p + r - 1) / math.sqrt(n))
        * (1 - 2 * tail(2 ** (m_acc - m_p + r) / math.sqrt(n)))
        for r in range(2, m_p + 1)
        if n > alpha(r - 1)
    }  # fmt: skip
    rest = 1 - 2 * tail(2 ** (m_acc - m_p + 1) / math.sqrt(n))
    kept = sum((i - all_stages) * q for i, q in full.items()) + sum((n - alpha(r - 1)) * q for r, q in partial.items())
    return (kept + n * rest) / ((sum(full.values()) + sum(partial.values()) + rest) * n)


@pytest.mark.parametrize(
    ("m_acc", "m_p", "n", "expected"),
    [
        (5, 5, 256, 0.959837),
        (6, 5, 1024, 0.945290),
        (8, 5, 4096, 0.998974),
        (10, 5, 65536, 0.999642),
        (12, 5, 10**6, 0.999696),
        (7, 2, 4096, 0.890962),
        (9, 7, 4096, 0.999737),
    ],
)
def test_checked_values(m_acc: int, m_p: int, n: int, expected: float) -> None:
    assert variance_retention_ratio(m_acc, m_p, n) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("m_acc", "m_p", "n"), [(4, 5, 300), (6, 5, 1024), (7, 2, 4096), (5, 3, 20_000), (3, 1, 2)])
def test_equal_to_the_formula_term_by_term(m_acc: int, m_p: int, n: int) -> None:
    assert variance_retention_ratio(m_acc, m_p, n) == pytest.approx(plain_formula(m_acc, m_p, n), abs=1e-13)


@pytest.mark.parametrize(("m_acc", "n"), [(9, 200_000), (10, 200_000), (12, 200_000), (5, 200_000)])
def test_integrals_replace_sums_of_many_terms(m_acc: int, n: int) -> None:
    """n (1 - VRR) decides, so it must be right, too."""
    lost = n * (1 - plain_formula(m_acc, 5, n))
    assert log_variance_lost(m_acc, 5, n) == pytest.approx(lost, rel=1e-7, abs=1e-9)


def test_the_table_of_predicted_bits() -> None:
    """Of (1,5,2) products: plain, with half of the terms zero, and in chunks of 64."""
    assert [min_accumulator_bits(5, n) for n in LENGTHS] == [5, 7, 7, 8, 9, 10, 12, 14, 17]
    assert [min_accumulator_bits(5, n, nonzero_ratio=0.5) for n in LENGTHS] == [5, 6, 7, 7, 8, 10, 12, 13, 15]
    assert [min_accumulator_bits(5, n, 64) for n in LENGTHS] == [5, 5, 5, 5, 5, 6, 8, 10, 11]


def test_limits() -> None:
    """VRR tends to 1 with more bits and falls with the length; ten million terms take no time or memory."""
    ratios = [variance_retention_ratio(bits, 5, 4096) for bits in range(5, 16)]
    assert ratios == sorted(ratios) and ratios[-1] == 1.0
    ratios = [variance_retention_ratio(8, 5, 2**power) for power in range(4, 20)]
    assert ratios == sorted(ratios, reverse=True)
    assert all(0 < variance_retention_ratio(bits, 5, 10**7) <= 1 for bits in (5, 10, 15, 20))
    assert min_accumulator_bits(5, 1) == min_accumulator_bits(5, 10**6, nonzero_ratio=0.0) == 5
    assert min_accumulator_bits(5, 10**12) > min_accumulator_bits(5, 10**7)


def test_chunks() -> None:
    inner, outer = variance_retention_ratio(6, 5, 64), variance_retention_ratio(6, 6, 400)
    assert variance_retention_ratio(6, 5, 64 * 400, 64) == pytest.approx(inner * outer, abs=1e-15)
    assert variance_retention_ratio(6, 5, 60, 64) == variance_retention_ratio(6, 5, 60)
    half = variance_retention_ratio(6, 5, 32) * variance_retention_ratio(6, 6, 400)
    assert variance_retention_ratio(6, 5, 64 * 400, 64, nonzero_ratio=0.5) == pytest.approx(half, abs=1e-15)


@pytest.mark.parametrize(("m_acc", "n"), [(5, 256), (6, 1024), (7, 4096)])
def test_the_formula_is_conservative_under_round_to_nearest(m_acc: int, n: int) -> None:
    """The simulated variance is at least that of the formula, less three standard errors; truncation has less."""
    generator = torch.Generator().manual_seed(m_acc)
    products = FP8_E5M2.round(torch.randn(512, n, generator=generator)) * FP8_E5M2.round(
        torch.randn(512, n, generator=generator)
    )
    exact = products.double().sum(1).var()
    accumulator = FloatFormat(8, m_acc)
    nearest, truncated = (
        float(emulated_sum(products, accumulator, rounding=rounding).double().var() / exact)
        for rounding in ("nearest", "truncate")
    )
    assert nearest >= variance_retention_ratio(m_acc, 5, n) - 3 * math.sqrt(2 / 512)
    assert truncated < 0.6 * nearest


def test_bad_inputs() -> None:
    with pytest.raises(ConfigError, match="1 to 48 mantissa bits and accumulators 1 to 128, not 0 and 5"):
        variance_retention_ratio(5, 0, 100)
    with pytest.raises(ConfigError, match="1 to 1e\\+12 terms, not 0"):
        min_accumulator_bits(5, 0)
    with pytest.raises(ConfigError, match="a chunk has at least one term, not 0"):
        min_accumulator_bits(5, 10, 0)
    with pytest.raises(ConfigError, match=r"between 0 and 1, not 1\.5"):
        min_accumulator_bits(5, 10, nonzero_ratio=1.5)
