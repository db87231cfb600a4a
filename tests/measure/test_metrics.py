"""Metrics against scipy, against their definitions, and against hand-computed cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from smelt.measure.metrics import METRICS, accuracy, f1, matthews, pearson, ranks, spearman


def test_by_hand() -> None:
    labels = np.array([1, 1, 1, 0, 0, 0, 0, 0])
    predictions = np.array(
        [1, 1, 0, 1, 0, 0, 0, 0]
    )  # 2 true positives, 1 false negative, 1 false positive, 4 true negatives
    assert accuracy(predictions, labels) == 6 / 8
    assert f1(predictions, labels) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert matthews(predictions, labels) == pytest.approx((2 * 4 - 1 * 1) / np.sqrt(3 * 3 * 5 * 5))


def test_more_classes_by_hand() -> None:
    labels = np.array([0, 0, 1, 1, 2, 2])
    predictions = np.array([0, 1, 1, 1, 2, 0])
    assert f1(predictions, labels) == pytest.approx(np.mean([2 / (2 + 2), 4 / (4 + 1), 2 / (2 + 1)]))
    # 4 of 6 correct; predicted 2, 3, 1 and actual 2, 2, 2 per class
    assert matthews(predictions, labels) == pytest.approx((4 * 6 - 12) / np.sqrt((36 - 14) * (36 - 12)))


def test_matthews_is_the_correlation_for_two_classes() -> None:
    generator = np.random.default_rng(0)
    labels, predictions = generator.integers(0, 2, (2, 300))
    assert matthews(predictions, labels) == pytest.approx(stats.pearsonr(predictions, labels)[0])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 5), st.floats(-3, 3).map(lambda x: round(x, 1))), min_size=3, max_size=40))
def test_correlations_equal_scipy(pairs: list[tuple[int, float]]) -> None:
    first, second = np.array(pairs, dtype=float).T
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        assert spearman(first, second) == pearson(first, second) == 0
        return
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second)[0], abs=1e-12)
    assert pearson(first, second) == pytest.approx(stats.pearsonr(first, second)[0], abs=1e-12)
    assert np.array_equal(ranks(first, np.ones(len(first))), stats.rankdata(first))


def test_constant_predictions() -> None:
    labels = np.array([0, 1, 1, 0])
    assert f1(np.zeros(4), labels) == 0 and matthews(np.ones(4), labels) == 0
    assert f1(np.zeros(4), np.zeros(4)) == 0


@pytest.mark.parametrize("name", METRICS)
def test_counts_equal_repeated_rows(name: str) -> None:
    generator = np.random.default_rng(1)
    labels, predictions = generator.integers(0, 3, (2, 30))
    counts = generator.multinomial(30, np.full(30, 1 / 30), size=20).astype(float)
    counts[0] = (labels != 0) & (predictions != 0)  # a sample without one of the classes
    together = METRICS[name](predictions, labels, counts)
    for row, value in zip(counts.astype(int), together, strict=True):
        assert value == pytest.approx(
            float(METRICS[name](np.repeat(predictions, row), np.repeat(labels, row))), abs=1e-12
        )
