"""Confidence quantiles of the difference between two models, by the method that suits the metric.

Accuracy uses the score interval for paired proportions (Tango 1998), which stays valid when hardly any item changed.
Perplexity uses the block bootstrap, because windows of one text are correlated. Other metrics use a bootstrap over the
items, widened for small samples (Hesterberg 2015, "What Teachers Should Know About the Bootstrap").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import optimize
from scipy.special import ndtr, ndtri, stdtrit

from smelt.measure.bootstrap import automatic_block_length, long_run_error, matmul, sample_counts
from smelt.measure.eval_result import EvalResult
from smelt.measure.metrics import CLASSIFICATION_METRICS, METRICS, item_mean

SCORE, ITEM_BOOTSTRAP, BLOCK_BOOTSTRAP = "score interval", "item bootstrap", "block bootstrap"

Quantile = Callable[[float], float]


@dataclass(frozen=True)
class PairedQuantiles:
    """Confidence quantiles of new minus base and, for perplexity, of the ratio: functions of a probability."""

    method: str
    block_length: int | None
    difference: Quantile
    ratio: Quantile | None


def paired_quantiles(new: EvalResult, base: EvalResult, resamples: int, seed: int) -> PairedQuantiles:
    """Choose the method by the metric and run its bootstrap."""
    if len(new.items) < 2:
        return PairedQuantiles(
            method_of(new.metric), None, _unbounded, _unbounded if new.metric == "perplexity" else None
        )
    if new.metric == "perplexity":
        with np.errstate(all="ignore"):  # a value that is not finite has bounds that are not numbers
            return _perplexity_quantiles(new, base, resamples, seed)
    if new.metric == "accuracy":
        lost, gained = discordant(new, base)
        return PairedQuantiles(SCORE, None, lambda level: score_quantile(gained, lost, len(new.items), level), None)
    return PairedQuantiles(ITEM_BOOTSTRAP, None, _item_quantile(new, base, resamples, seed), None)


def discordant(new: EvalResult, base: EvalResult) -> tuple[int, int]:
    """Return how many items only the base model got right, and how many only the new one."""
    right, right_before = new.predictions == new.labels, base.predictions == base.labels
    return int(np.sum(right_before & ~right)), int(np.sum(right & ~right_before))


def score_quantile(gained: int, lost: int, items: int, level: float) -> float:
    """Return the bound below which the change of accuracy is with probability `level`. The test is Tango's (1998)."""
    if level < 0.5:
        return -score_quantile(lost, gained, items, 1 - level)
    critical = float(stdtrit(items - 1, level))
    observed = (gained - lost) / items

    def excess(difference: float) -> float:
        return (items * (difference - observed)) - critical * math.sqrt(
            items * score_variance(gained, lost, items, difference)
        )

    # If no item changed, the observed change itself also solves the equation, hence a start just above it.
    return 1.0 if excess(1.0) <= 0 else float(optimize.brentq(excess, observed + 1e-12, 1.0, xtol=1e-13))


def score_variance(gained: int, lost: int, items: int, difference: float) -> float:
    """Return the variance per item of the change of accuracy if its true value were `difference`.

    The probability of a lost item is its maximum likelihood estimate under that constraint.
    """
    linear = (2 * items - gained + lost) * difference - gained - lost
    constant = -lost * difference * (1 - difference)
    losing = max(0.0, (math.sqrt(max(0.0, linear**2 - 8 * items * constant)) - linear) / (4 * items))
    return max(0.0, 2 * losing + difference * (1 - difference))


def _perplexity_quantiles(new: EvalResult, base: EvalResult, resamples: int, seed: int) -> PairedQuantiles:
    assert new.weights is not None
    shares = new.weights / new.weights.mean()
    log_ratio = math.log(new.value / base.value) if 0 < new.value / base.value < math.inf else math.nan
    # Each window's influence on the statistic, whose long-run variance is the variance of the statistic.
    ratio_influence = shares * (new.items - base.items - log_ratio)
    influence = shares * (
        new.value * (new.items - math.log(new.value)) - base.value * (base.items - math.log(base.value))
    )
    block_length = automatic_block_length(ratio_influence)
    resampled = []
    for counts in sample_counts(len(new.items), resamples, seed, block_length):
        weights = counts * new.weights
        sums = matmul(weights, np.stack([new.items, base.items], axis=1))
        resampled.append(sums / weights.sum(axis=1, keepdims=True))
    values, references = np.concatenate(resampled).T
    differences = np.exp(values) - np.exp(references)
    difference = _scaled_quantile(differences, new.value - base.value, influence)
    log_quantile = _scaled_quantile(values - references, log_ratio, ratio_influence)
    return PairedQuantiles(BLOCK_BOOTSTRAP, block_length, difference, lambda level: math.exp(log_quantile(level)))


def _scaled_quantile(values: np.ndarray, estimate: float, influence: np.ndarray) -> Quantile:
    """Scale the deviations of the resamples to a t interval with the long-run standard error of the influence."""
    if not (np.isfinite(values).all() and np.isfinite(influence).all()):
        return lambda level: math.nan
    error, degrees = long_run_error(influence)
    spread = float(np.std(values))

    def quantile(level: float) -> float:
        deviation = float(np.quantile(values, level)) - estimate
        if spread == 0 or level == 0.5:
            return estimate + deviation
        return estimate + deviation * float(stdtrit(degrees, level) / ndtri(level)) * error / spread

    return quantile


def _item_quantile(new: EvalResult, base: EvalResult, resamples: int, seed: int) -> Quantile:
    """Resample the items; the percentiles are widened by the ratio of Student's t to normal quantiles."""
    items, metric = len(new.items), METRICS.get(new.metric, item_mean)
    differences = np.concatenate(
        [
            metric(new.predictions, new.labels, counts) - metric(base.predictions, base.labels, counts)
            for counts in sample_counts(items, resamples, seed)
        ]
    )
    estimate = new.value - base.value

    def quantile(level: float) -> float:
        tail = ndtr(math.sqrt(items / (items - 1)) * stdtrit(items - 1, level))
        return float(np.quantile(differences, tail))

    if new.metric not in CLASSIFICATION_METRICS:
        return quantile
    return _widened_for_few_changes(quantile, estimate, new, base)


def _widened_for_few_changes(quantile: Quantile, estimate: float, new: EvalResult, base: EvalResult) -> Quantile:
    """Widen by as much as the score interval of the accuracy of the same predictions is wider than its Wald interval.

    A bootstrap over classes is too narrow if few items changed, and has no width at all if none did.
    """
    items, (lost, gained) = len(new.items), discordant(new, base)
    change = (gained - lost) / items
    wald = math.sqrt(((gained + lost) / items - change**2) / (items - 1))

    def widened(level: float) -> float:
        if lost + gained == 0:
            flips = math.ceil(ndtri(level) ** 2)  # the rule of three, at a one-sided 95 %
            return math.copysign(_cost_of_lost_items(new, flips), level - 0.5)
        score = score_quantile(gained, lost, items, level) - change
        width = abs(float(stdtrit(items - 1, level))) * wald
        return estimate + (quantile(level) - estimate) * max(1.0, abs(score) / width if width > 0 else 1.0)

    return widened


def _cost_of_lost_items(quality: EvalResult, flips: int) -> float:
    """Return the largest change of the metric if `flips` correct predictions of one class were wrong."""
    assert quality.predictions is not None and quality.labels is not None
    metric, classes = METRICS[quality.metric], np.unique(np.append(quality.labels, quality.predictions))
    costs = [0.0]
    for label in classes:
        correct = np.flatnonzero((quality.labels == label) & (quality.predictions == label))[:flips]
        other = classes[classes != label][0] if len(classes) > 1 else label + 1
        predictions = quality.predictions.copy()
        predictions[correct] = other
        costs.append(abs(quality.value - float(metric(predictions, quality.labels))))
    return max(costs)


def method_of(metric: str) -> str:
    """Return the method that a metric's intervals use."""
    return {"perplexity": BLOCK_BOOTSTRAP, "accuracy": SCORE}.get(metric, ITEM_BOOTSTRAP)


def _unbounded(level: float) -> float:
    return math.copysign(math.inf, level - 0.5)
