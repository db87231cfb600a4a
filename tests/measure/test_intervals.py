"""Confidence quantiles: the block bootstrap and the score interval against formulas, and their coverage."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, signal, stats

from smelt.measure.bootstrap import (
    _first_correlation,
    automatic_block_length,
    long_run_degrees,
    long_run_error,
    sample_counts,
)
from smelt.measure.eval_result import EvalResult
from smelt.measure.intervals import paired_quantiles, score_quantile
from smelt.measure.metrics import METRICS

ROOT = Path(__file__).parents[2]


def autoregression(generator: np.random.Generator, items: int, correlation: float) -> np.ndarray:
    """A first-order autoregression with unit variance. [items]"""
    noise = generator.normal(size=items)
    noise[1:] *= math.sqrt(1 - correlation**2)
    return np.asarray(signal.lfilter([1.0], [1.0, -correlation], noise))


def windowed(items: np.ndarray) -> EvalResult:
    return EvalResult("perplexity", math.exp(items.mean()), False, "text", items, weights=np.full(len(items), 511.0))


def classified(predictions: np.ndarray, labels: np.ndarray, metric: str = "accuracy") -> EvalResult:
    value = float(METRICS[metric](predictions, labels))
    items = (predictions == labels).astype(float)
    return EvalResult(metric, value, True, "data", items, predictions=predictions, labels=labels)


@pytest.mark.parametrize("block_length", [1, 4, 7])
def test_block_resamples_have_the_variance_of_the_formula(block_length: int) -> None:
    """Of n / b blocks on a circle: the Bartlett-weighted circular autocovariances (n = 28 is a multiple of b)."""
    series = autoregression(np.random.default_rng(0), 28, 0.6)
    counts = np.concatenate(list(sample_counts(28, 40_000, 1, block_length)))
    assert (counts.sum(axis=1) == 28).all()
    centered = series - series.mean()
    covariances = [(centered * np.roll(centered, lag)).mean() for lag in range(block_length)]
    expected = covariances[0] + 2 * sum((1 - lag / block_length) * covariances[lag] for lag in range(1, block_length))
    assert (counts @ series / 28).var() == pytest.approx(expected / 28, rel=0.05)


def test_the_last_block_is_cut() -> None:
    assert all((counts.sum(axis=1) == 29).all() for counts in sample_counts(29, 50, 0, 7))


@pytest.mark.parametrize("correlation", [0.3, 0.7])
def test_the_block_length_approaches_the_optimum_of_an_autoregression(correlation: float) -> None:
    series = autoregression(np.random.default_rng(2), 20_000, correlation)
    optimum = (1.5 * (2 * correlation / (1 - correlation**2)) ** 2 * 20_000) ** (1 / 3)
    assert automatic_block_length(series) == pytest.approx(optimum, rel=0.2)


def test_block_lengths_of_odd_series() -> None:
    noise = np.random.default_rng(3).normal(size=(50, 400))
    assert np.median([automatic_block_length(row) for row in noise]) <= 2
    assert 10 <= automatic_block_length(np.arange(60.0)) <= 20  # a trend: at most a third of the items
    for series in (np.zeros(50), np.array([1.0, 2.0]), np.full(50, math.nan), np.tile([1.0, -1.0], 30)):
        assert automatic_block_length(series) >= 1


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_long_run_error_is_that_of_the_mean(correlation: float) -> None:
    generator = np.random.default_rng(4)
    errors = [long_run_error(autoregression(generator, 400, correlation))[0] ** 2 for _ in range(200)]
    assert np.mean(errors) == pytest.approx((1 + correlation) / (1 - correlation) / 400, rel=0.1)


def test_the_correlation_has_no_bias_but_half_a_standard_error() -> None:
    """The plain estimate of 40 items would be too low by (1 + 4 * 0.4) / 40 = 0.065."""
    generator = np.random.default_rng(6)
    series = [autoregression(generator, 40, 0.4) for _ in range(1000)]
    estimates = [_first_correlation(values - values.mean()) for values in series]
    assert np.mean(estimates) == pytest.approx(0.4 + 0.5 * math.sqrt((1 - 0.4**2) / 40), abs=0.02)


def test_the_degrees_of_freedom_grow_as_the_power_two_thirds() -> None:
    """More cosines would be of frequencies at which a correlated series varies less than at 0."""
    assert [long_run_degrees(items) for items in (2, 3, 8, 100, 1000)] == [1, 2, 2, 9, 41]


@pytest.mark.parametrize(
    ("gained", "lost", "items"), [(0, 0, 100), (3, 1, 60), (0, 5, 200), (40, 55, 872), (7, 7, 20), (3, 0, 4)]
)
@pytest.mark.parametrize("level", [0.025, 0.05, 0.95, 0.975])
def test_the_score_bound_inverts_the_score_test(gained: int, lost: int, items: int, level: float) -> None:
    """At the bound, the observed change is as many constrained standard errors away as the critical value."""
    bound = score_quantile(gained, lost, items, level)

    def loss(losing: float) -> float:  # negative log-likelihood of the trinomial with this change of accuracy
        chances = np.array([losing + bound, losing, 1 - 2 * losing - bound])
        counts = np.array([gained, lost, items - gained - lost])
        return float(-np.sum(counts * np.log(np.maximum(chances, 1e-300))))

    lowest, highest = max(0.0, -bound), min(1.0, (1 - bound) / 2)
    losing = optimize.minimize_scalar(loss, bounds=(lowest, highest), method="bounded", options={"xatol": 1e-12}).x
    error = math.sqrt((2 * losing + bound - bound**2) / items)
    assert (bound - (gained - lost) / items) / error == pytest.approx(stats.t.ppf(level, items - 1), rel=1e-3)


@pytest.mark.parametrize("items", [8, 12])
def test_the_bootstrap_over_few_items_is_as_wide_as_a_t_interval(items: int) -> None:
    changes = stats.norm.ppf((np.arange(items) + 0.5) / items)
    new = EvalResult("loss", float(changes.mean()), False, "data", changes, predictions=changes)
    base = EvalResult("loss", 0.0, False, "data", np.zeros(items), predictions=np.zeros(items))
    quantile = paired_quantiles(new, base, 20_000, 0).difference
    error = float(np.std(changes, ddof=1)) / math.sqrt(items)
    for level in (0.1, 0.9):
        assert quantile(level) == pytest.approx(stats.t.ppf(level, items - 1) * error, rel=0.05)


def test_with_few_changes_the_bootstrap_is_widened_as_the_score_interval_is() -> None:
    labels = np.arange(100) % 2
    predictions = np.where(np.arange(100) < 3, 1 - labels, labels)
    new, base = classified(predictions, labels, "f1"), classified(labels, labels, "f1")
    generator = np.random.default_rng(5)
    resamples = [METRICS["f1"](predictions[drawn], labels[drawn]) for drawn in generator.integers(0, 100, (4000, 100))]
    drop, wald = new.value - base.value, float(np.std(new.items, ddof=1)) / 10
    critical = float(stats.t.ppf(0.05, 99))
    narrow = float(np.quantile(resamples, stats.norm.cdf(critical))) - new.value
    factor = (score_quantile(0, 3, 100, 0.05) + 0.03) / (critical * wald)
    assert factor > 1.3
    assert paired_quantiles(new, base, 4000, 0).difference(0.05) == pytest.approx(drop + factor * narrow, rel=0.05)


def test_nothing_changed_is_no_proof_in_few_items() -> None:
    labels = np.arange(100) % 2
    for metric in ("accuracy", "f1", "matthews"):
        same = classified(labels, labels, metric)
        quantiles = paired_quantiles(same, same, 100, 0)
        assert -0.08 < quantiles.difference(0.05) < -0.01 and quantiles.difference(0.95) > 0.01


def coverage(correlation: float, windows: int, replicates: int, generator: np.random.Generator) -> tuple[float, float]:
    """Return how often the interval of the ratio covers the truth, and how often its one-sided bound is below it."""
    covered = accepted = 0
    for seed in range(replicates):
        base = 3 + 0.4 * autoregression(generator, windows, correlation)
        pair = windowed(base + 0.01 + 0.03 * autoregression(generator, windows, correlation)), windowed(base)
        ratio = paired_quantiles(*pair, resamples=400, seed=seed).ratio
        assert ratio is not None
        covered += ratio(0.025) <= math.exp(0.01) <= ratio(0.975)
        accepted += ratio(0.95) < math.exp(0.01)
    return covered / replicates, accepted / replicates


@pytest.mark.parametrize(("correlation", "windows"), [(0.0, 40), (0.5, 40), (0.5, 160)])
def test_correlated_windows_are_covered(correlation: float, windows: int) -> None:
    """Resampling single windows covers 0.75 at a correlation of 0.5; the standard deviation of 400 is 0.011."""
    covered, accepted = coverage(correlation, windows, 400, np.random.default_rng(5))
    assert 0.92 <= covered <= 0.98
    assert accepted <= 0.08


def test_few_changed_items_are_covered() -> None:
    """Two lost items of 200 are expected. The drop is below the bound of a plain bootstrap in 13 % of the cases."""
    generator = np.random.default_rng(6)
    accepted = 0
    for _ in range(400):
        lost = int(generator.binomial(200, 0.01))
        accepted += -score_quantile(0, lost, 200, 0.05) < 0.01
    assert accepted == 0


def test_values_that_are_not_numbers_have_no_bounds() -> None:
    base = windowed(np.linspace(2, 3, 20))
    for value in (math.nan, math.inf):
        broken = windowed(np.where(np.arange(20) == 3, value, base.items))
        quantiles = paired_quantiles(broken, base, 50, 0)
        assert quantiles.ratio is not None
        assert math.isnan(quantiles.difference(0.95)) and math.isnan(quantiles.ratio(0.95))


def test_the_interval_does_not_depend_on_the_threads_of_blas() -> None:
    """A run is reproduced to the bit with the recorded threads of torch, but those of NumPy are set elsewhere."""
    program = (
        "import numpy as np\n"
        "from tests.measure.test_intervals import windowed\n"
        "from smelt.measure.intervals import paired_quantiles\n"
        "base = np.random.default_rng(0).normal(3.0, 0.3, 776)\n"
        "new = base + np.random.default_rng(1).normal(0.05, 0.05, 776)\n"
        "quantiles = paired_quantiles(windowed(new), windowed(base), 1000, 0)\n"
        "print(quantiles.difference(0.025).hex(), quantiles.ratio(0.975).hex())\n"
    )
    results = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "OPENBLAS_NUM_THREADS": threads}, cwd=ROOT,
            capture_output=True, text=True, check=True,
        ).stdout
        for threads in ("1", "2")
    }  # fmt: skip
    assert len(results) == 1, results
