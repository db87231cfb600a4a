"""Paired comparison of two models on the same items: the difference and its confidence interval.

The interval of accuracy is a score interval, that of perplexity a block bootstrap, and that of other metrics a
bootstrap over the items (`intervals.py`). McNemar's exact test uses the items that only one of the two models got
right.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import log_softmax

from smelt.errors import DataError
from smelt.measure.eval_result import EvalResult
from smelt.measure.intervals import Quantile, discordant, paired_quantiles

_NUM_WORST = 10


@dataclass(frozen=True)
class Change:
    """An item whose score became worse."""

    item: int
    base: float
    new: float


@dataclass(frozen=True)
class PairedComparison:
    """The new model compared with the base model. Differences are new minus base; the ratio is for perplexity only."""

    metric: str
    data: str
    higher_is_better: bool
    items: int
    new: float
    base: float
    difference: float
    interval: tuple[float, float]
    ratio: float | None
    ratio_interval: tuple[float, float] | None
    confidence: float
    method: str  # of the interval
    block_length: int | None  # neighboring items resampled together, for perplexity
    resamples: int
    seed: int
    gained: int | None  # items only the new model got right
    lost: int | None  # items only the base model got right
    mcnemar: float | None  # two-sided p-value
    flips: float | None  # fraction of items whose prediction changed, right or wrong
    divergence: float | None  # mean KL(base || new) of the predicted classes, in nats
    worst: tuple[Change, ...]

    @property
    def verdict(self) -> str:
        """The verdict at this confidence: better, worse, or no clear difference."""
        low, high = self.interval
        if math.isnan(low) or math.isnan(high):  # a score that is not a number is never an improvement
            return "worse"
        if low <= 0 <= high:
            return "no clear difference"
        return "better" if (low > 0) == self.higher_is_better else "worse"

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the verdict as plain values; non-finite bounds become null."""
        values = asdict(self) | {"verdict": self.verdict}
        for name in ("interval", "ratio_interval"):
            if values[name] is not None:
                values[name] = [bound if math.isfinite(bound) else None for bound in values[name]]
        values["worst"] = list(values["worst"])
        return values


def compare(
    new: EvalResult, base: EvalResult, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> PairedComparison:
    """Compare two measurements of the same metric on the same items."""
    check_pair(new, base, confidence, resamples)
    quantiles = paired_quantiles(new, base, resamples, seed)
    gained, lost = _discordant(new, base)
    perplexities = new.metric == "perplexity"
    return PairedComparison(
        metric=new.metric,
        data=new.data,
        higher_is_better=new.higher_is_better,
        items=len(new.items),
        new=new.value,
        base=base.value,
        difference=new.value - base.value,
        interval=_interval(quantiles.difference, confidence),
        ratio=new.value / base.value if perplexities else None,
        ratio_interval=None if quantiles.ratio is None else _interval(quantiles.ratio, confidence),
        confidence=confidence,
        method=quantiles.method,
        block_length=quantiles.block_length,
        resamples=resamples,
        seed=seed,
        gained=gained,
        lost=lost,
        mcnemar=mcnemar(gained, lost) if gained is not None and lost is not None else None,
        flips=_flips(new, base),
        divergence=_divergence(new, base),
        worst=_worst(new, base),
    )


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided exact p-value of McNemar's test: each discordant item is a fair coin toss."""
    return float(min(1.0, 2 * stats.binom.cdf(min(gained, lost), gained + lost, 0.5)))


def check_pair(new: EvalResult, base: EvalResult, confidence: float, resamples: int) -> None:
    """Refuse two measurements that are not of the same metric on the same items."""
    if not 0 < confidence < 1 or resamples < 1:
        raise DataError(
            f"Confidence {confidence} or resamples {resamples} is invalid: expected 0 to 1, and at least 1."
        )
    if new.metric != base.metric:
        raise DataError(f"{new.metric} and {base.metric} cannot be compared: measure both models by the same metric.")
    same_items = len(new.items) == len(base.items) and new.settings == base.settings
    same_items = same_items and _equal_or_none(new.weights, base.weights) and _equal_or_none(new.labels, base.labels)
    if new.data != base.data or not same_items:
        raise DataError(
            f"The two models were not measured on the same items ({len(new.items):,} of {new.data}, "
            f"{len(base.items):,} of {base.data}): measure both with the same data and settings."
        )


def _equal_or_none(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def _interval(quantile: Quantile, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    return quantile(tail), quantile(1 - tail)


def _correct_predictions(quality: EvalResult) -> np.ndarray | None:
    """Return which predictions are correct, or None if the metric has no correct ones. [items]"""
    if quality.predictions is None or quality.labels is None or quality.metric in ("spearman", "pearson", "wer"):
        return None
    return quality.predictions == quality.labels


def _discordant(new: EvalResult, base: EvalResult) -> tuple[int | None, int | None]:
    """Return the gained and lost items, or None if the metric has no correct predictions."""
    if _correct_predictions(new) is None or _correct_predictions(base) is None:
        return None, None
    lost, gained = discordant(new, base)
    return gained, lost


def _flips(new: EvalResult, base: EvalResult) -> float | None:
    if _correct_predictions(new) is None or new.predictions is None or base.predictions is None:
        return None
    return float((new.predictions != base.predictions).mean())


def _divergence(new: EvalResult, base: EvalResult) -> float | None:
    if new.logits is None or base.logits is None or new.logits.shape != base.logits.shape or new.logits.shape[1] < 2:
        return None
    log_new, log_base = (log_softmax(logits.astype(np.float64), axis=1) for logits in (new.logits, base.logits))
    return float((np.exp(log_base) * (log_base - log_new)).sum(axis=1).mean())


def _worst(new: EvalResult, base: EvalResult) -> tuple[Change, ...]:
    """Return the items that got worse the most, worst first."""
    gain = (new.items - base.items) * (1 if new.higher_is_better else -1)
    order = np.argsort(gain, kind="stable")[:_NUM_WORST]
    return tuple(Change(int(item), float(base.items[item]), float(new.items[item])) for item in order if gain[item] < 0)
