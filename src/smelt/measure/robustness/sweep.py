"""Quality against the bit error rate: many evaluations of one network with different flips, and what they show.

Reported per rate: the metric of every seed, the fraction of predictions that changed (silent data corruption, SDC-1),
and the fraction of items without a finite output. Such items count as wrong, since nothing was predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.measure.eval_result import EvalResult
from smelt.measure.robustness.bit_flips import flipped_bits, sample_flips
from smelt.measure.robustness.storage import StoredTensor
from smelt.progress import NullProgress, Progress

Evaluate = Callable[[], EvalResult]
_RESAMPLES = 2000


@dataclass(frozen=True, eq=False)
class FaultPoint:
    """Evaluations under faults at one bit error rate, one per seed."""

    target: str  # what was hit
    ber: float
    clipped: bool  # with range clipping
    bits: int  # that could be hit
    flips: tuple[int, ...]  # [seeds]
    values: tuple[float, ...]  # the metric [seeds]
    changed: tuple[float, ...] | None  # fraction of changed predictions [seeds]; None without predictions
    nonfinite: tuple[float, ...]  # fraction of items without a finite output [seeds]
    items: np.ndarray  # scores [seeds, items]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def changed_given_a_flip(self) -> float | None:
        """The mean fraction of changed predictions over the seeds with at least one flip."""
        if self.changed is None:
            return None
        hit = [changed for changed, flips in zip(self.changed, self.flips, strict=True) if flips]
        return float(np.mean(hit)) if hit else None

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "ber": self.ber,
            "clipped": self.clipped,
            "bits": self.bits,
            "flips": list(self.flips),
            "values": [_finite_or_none(value) for value in self.values],
            "mean": _finite_or_none(self.mean),
            "changed": None if self.changed is None else list(self.changed),
            "changed_given_a_flip": self.changed_given_a_flip,
            "nonfinite": list(self.nonfinite),
        }


def bit_error_sweep(
    tensors: Sequence[StoredTensor],
    evaluate: Evaluate,
    *,
    bers: Sequence[float],
    seeds: int,
    target: str = "all",
    bit: int | None = None,
    clipped: bool = False,
    clean: EvalResult | None = None,
    progress: Progress = NullProgress(),  # noqa: B008
) -> list[FaultPoint]:
    """Evaluate with random flips in these tensors at every rate and seed; `clean` saves the evaluation without."""
    clean = evaluate() if clean is None else clean
    points = []
    for ber in progress.track(bers, f"bit errors in {target}{', clipped' if clipped else ''}"):
        results, flips = [], []
        for seed in range(seeds):
            positions = sample_flips(tensors, ber, np.random.default_rng([seed, _rate_key(ber)]), bit=bit)
            with flipped_bits(tensors, positions):
                results.append(evaluate() if len(positions) else clean)
            flips.append(len(positions))
        bits = sum(entry.num_bits if bit is None else entry.num_elements for entry in tensors)
        points.append(fault_point(results, clean, target=target, ber=ber, clipped=clipped, bits=bits, flips=flips))
    return points


def fault_point(
    results: Sequence[EvalResult],
    clean: EvalResult,
    *,
    target: str,
    ber: float,
    clipped: bool,
    bits: int,
    flips: Sequence[int],
) -> FaultPoint:
    """Summarize the evaluations of one rate."""
    scored = [score(result) for result in results]
    has_predictions = clean.predictions is not None and clean.metric not in ("spearman", "pearson")
    return FaultPoint(
        target=target,
        ber=ber,
        clipped=clipped,
        bits=bits,
        flips=tuple(flips),
        values=tuple(value for value, _ in scored),
        changed=tuple(_changed(result, clean) for result in results) if has_predictions else None,
        nonfinite=tuple(float((~finite_items(result)).mean()) for result in results),
        items=np.stack([items for _, items in scored]),
    )


def score(result: EvalResult) -> tuple[float, np.ndarray]:
    """Return the metric and the items' scores; an item without a finite output is wrong. ([], [items])"""
    if result.metric != "accuracy":
        return result.value, result.items
    items = result.items * finite_items(result)
    return float(items.mean()), items


def finite_items(result: EvalResult) -> np.ndarray:
    """Return which items have finite outputs. [items]"""
    if result.logits is not None:
        return np.asarray(np.isfinite(result.logits).all(axis=1))
    return np.isfinite(result.items)


def tolerated_ber(points: Sequence[FaultPoint], clean: float, lowest: float) -> float | None:
    """Return the largest rate at which the mean stays at least `lowest`, interpolated in the logarithm of the rate.

    None if that is not known: below the smallest rate, or, if nothing was lost, beyond the largest one.
    """
    below: FaultPoint | None = None
    for point in sorted((point for point in points if point.ber > 0), key=lambda point: point.ber):
        if point.mean < lowest:
            if below is None:
                return None
            share = (below.mean - lowest) / (below.mean - point.mean)
            logarithm = (1 - share) * math.log10(below.ber) + share * math.log10(point.ber)
            return float(10**logarithm)
        below = point
    return None


def mean_difference(
    new: FaultPoint, base: FaultPoint, *, confidence: float = 0.95, seed: int = 0
) -> tuple[float, tuple[float, float]]:
    """Return the difference of two mean scores and its bootstrap interval, resampling seeds and items together.

    Both must have been evaluated on the same items. Faults of the two models are independent, so seeds are resampled
    separately.
    """
    generator = np.random.default_rng(seed)
    items = new.items.shape[1]
    picked = generator.integers(items, size=(_RESAMPLES, items))
    values = [np.zeros(_RESAMPLES), np.zeros(_RESAMPLES)]
    for side, point in enumerate((new, base)):
        rows = generator.integers(len(point.items), size=(_RESAMPLES, len(point.items)))
        for resample in range(_RESAMPLES):
            per_item = point.items[rows[resample]].mean(axis=0)  # [items]
            values[side][resample] = per_item[picked[resample]].mean()
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(values[0] - values[1], [tail, 100 - tail])
    return float(new.items.mean() - base.items.mean()), (float(low), float(high))


def _changed(result: EvalResult, clean: EvalResult) -> float:
    """Return the fraction of items whose prediction changed; without a finite output it did."""
    assert result.predictions is not None and clean.predictions is not None
    return float(((result.predictions != clean.predictions) | ~finite_items(result)).mean())


def _rate_key(ber: float) -> int:
    """Return a number for the generator's seed that differs between rates."""
    return int(np.float64(ber).view(np.uint64) >> np.uint64(32))


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
