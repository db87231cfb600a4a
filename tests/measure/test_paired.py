"""Paired comparison: exact tests against scipy, intervals against the truth, and invalid pairs."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from smelt.errors import DataError
from smelt.measure.eval_result import EvalResult
from smelt.measure.metrics import METRICS
from smelt.measure.paired import compare, mcnemar


def classified(predictions: np.ndarray, labels: np.ndarray, metric: str = "accuracy", **more: object) -> EvalResult:
    value = float(METRICS[metric](predictions, labels))
    items = (predictions == labels).astype(float)
    return EvalResult(metric, value, True, "data", items, predictions=predictions, labels=labels, **more)  # type: ignore[arg-type]


def windowed(items: np.ndarray, weights: np.ndarray) -> EvalResult:
    return EvalResult("perplexity", math.exp(np.average(items, weights=weights)), False, "text", items, weights=weights)


def simulated(generator: np.random.Generator, items: int) -> tuple[EvalResult, EvalResult]:
    """Base is right on 80%; new on 90% of those and 20% of the others, 76% in total: the truth is -4 points."""
    labels = generator.integers(0, 2, items)
    right = generator.random(items) < 0.8
    right_after = np.where(right, generator.random(items) < 0.9, generator.random(items) < 0.2)
    return classified(np.where(right_after, labels, 1 - labels), labels), classified(
        np.where(right, labels, 1 - labels), labels
    )


def test_counts_by_hand() -> None:
    labels = np.array([0, 1, 2, 1, 0, 2])
    base, new = np.array([0, 1, 2, 0, 1, 1]), np.array([0, 0, 1, 1, 2, 1])
    result = compare(classified(new, labels), classified(base, labels))
    assert (result.gained, result.lost, result.flips) == (1, 2, 4 / 6)
    assert result.difference == pytest.approx(-1 / 6)
    assert result.mcnemar == 1 and result.verdict == "no clear difference"
    assert [(change.item, change.base, change.new) for change in result.worst] == [(1, 1.0, 0.0), (2, 1.0, 0.0)]
    assert result.ratio is None and result.divergence is None


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (0, 1), (3, 3), (2, 11), (40, 17), (0, 60)])
def test_mcnemar_is_the_exact_binomial_test(gained: int, lost: int) -> None:
    expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(gained, lost) == mcnemar(lost, gained)


def test_intervals_of_accuracy_cover_the_truth() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for repeat in range(200):
        low, high = compare(*simulated(generator, 150), resamples=500, seed=repeat).interval
        covered += low <= -0.04 <= high
    # 95 % nominal: 190 of 200, with a standard deviation of 3.
    assert 181 <= covered <= 199


@pytest.mark.parametrize("windows", [8, 60])
def test_intervals_of_the_perplexity_ratio_cover_the_truth(windows: int) -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for repeat in range(200):
        weights = np.full(windows, 1023.0)
        base = generator.normal(3, 0.4, windows)
        pair = windowed(base + generator.normal(0.05, 0.06, windows), weights), windowed(base, weights)
        result = compare(*pair, resamples=500, seed=repeat)
        assert result.ratio_interval is not None
        covered += result.ratio_interval[0] <= math.exp(0.05) <= result.ratio_interval[1]
    assert 181 <= covered <= 199


def test_perplexity_counts_tokens() -> None:
    weights = np.array([1000.0, 1.0])
    pair = windowed(np.array([2.0, 9.0]), weights), windowed(np.array([1.5, 3.0]), weights)
    result = compare(*pair, resamples=200)
    assert result.ratio == pytest.approx(math.exp((1000 * 0.5 + 6) / 1001))
    assert result.difference == pytest.approx(result.new - result.base)
    assert [change.item for change in result.worst] == [1, 0]
    assert result.verdict == "worse" and result.mcnemar is None and result.flips is None


@pytest.mark.parametrize("metric", ["f1", "matthews", "spearman", "pearson"])
def test_each_resample_is_the_metric_itself(metric: str) -> None:
    generator = np.random.default_rng(2)
    labels = generator.integers(0, 3, 80)
    base = np.where(generator.random(80) < 0.8, labels, generator.integers(0, 3, 80))
    new = np.where(generator.random(80) < 0.9, base, generator.integers(0, 3, 80))
    result = compare(classified(new, labels, metric), classified(base, labels, metric), resamples=4000, confidence=0.9)
    drawn = generator.integers(0, 80, (4000, 80))
    values = [
        float(METRICS[metric](new[row], labels[row]) - METRICS[metric](base[row], labels[row])) for row in drawn[:1500]
    ]
    # The same percentiles from a plain loop; the widening for 80 items is a few percent of the width.
    expected = np.quantile(values, [0.05, 0.95])
    assert np.abs(np.array(result.interval) - expected).max() < 0.15 * np.ptp(expected)
    assert result.interval[0] <= result.difference <= result.interval[1]


@pytest.mark.parametrize("classes", [2, 3])
def test_divergence_and_agreement(classes: int) -> None:
    generator = np.random.default_rng(3)
    base, new = generator.normal(size=(2, 50, classes)).astype(np.float32)
    labels = generator.integers(0, classes, 50)
    pair = [classified(logits.argmax(1), labels, logits=logits) for logits in (new, base)]
    result = compare(*pair, resamples=100)
    p, q = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True) for logits in (base, new))
    assert result.divergence == pytest.approx(
        np.mean([stats.entropy(a, b) for a, b in zip(p, q, strict=True)]), rel=1e-5
    )
    same = compare(pair[0], pair[0], resamples=100)
    assert same.divergence == 0 and same.flips == 0 and same.worst == ()
    assert same.interval == (-same.interval[1], pytest.approx(2.01**2 / (50 + 2.01**2), rel=1e-2))  # t of 49 degrees


def test_clear_changes_have_a_clear_verdict() -> None:
    labels = np.zeros(200, dtype=int)
    good, bad = classified(labels, labels), classified(np.where(np.arange(200) < 60, 1, 0), labels)
    assert compare(good, bad, resamples=500).verdict == "better"
    assert compare(bad, good, resamples=500).verdict == "worse"
    assert len(compare(bad, good, resamples=500).worst) == 10


def test_the_seed_decides_and_json_is_plain() -> None:
    generator = np.random.default_rng(4)
    pair = [windowed(generator.normal(3, 1, 100), np.full(100, 9.0)) for _ in range(2)]
    first, repeated, other = (compare(*pair, resamples=300, seed=seed) for seed in (5, 5, 6))
    assert first == repeated and first.interval != other.interval
    plain = json.loads(json.dumps(first.to_json(), allow_nan=False))
    assert plain["interval"] == list(first.interval) and plain["verdict"] == first.verdict and plain["items"] == 100


def test_one_item_is_inconclusive() -> None:
    one = windowed(np.array([2.0]), np.array([10.0]))
    result = compare(one, one, resamples=10)
    assert result.verdict == "no clear difference"
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["interval"] == [None, None]


def test_invalid_pairs() -> None:
    quality = simulated(np.random.default_rng(5), 50)[0]
    assert quality.labels is not None
    others = [
        replace(quality, data="other data"),
        replace(quality, settings={"max_length": 64}),
        replace(quality, labels=1 - quality.labels),
        replace(quality, labels=None),
        simulated(np.random.default_rng(5), 49)[0],
    ]
    for other in others:
        with pytest.raises(DataError, match="not measured on the same items"):
            compare(other, quality)
    with pytest.raises(DataError, match="f1 and accuracy cannot be compared"):
        compare(replace(quality, metric="f1"), quality)
    with pytest.raises(DataError, match="invalid"):
        compare(quality, quality, confidence=1)


def test_ten_thousand_items_take_seconds() -> None:
    pair = simulated(np.random.default_rng(6), 10_000)
    start = time.perf_counter()
    compare(*pair)
    assert time.perf_counter() - start < 30
