"""The result of evaluating a model on data, with one score per item for paired comparisons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smelt.errors import DataError, ModelError


@dataclass(frozen=True, eq=False)
class EvalResult:
    """One metric on one data set.

    `items` holds one score per item, with the same direction as the metric: 1 or 0 for right or wrong, the mean
    negative log-likelihood of a window, or the closeness in rank. `weights` are the scored tokens per window.
    Predictions, labels and logits are set if the metric uses them; `by_normalization` is set by multiple choice: the
    accuracy under every normalization.
    """

    metric: str
    value: float
    higher_is_better: bool
    data: str
    items: np.ndarray  # [items]
    weights: np.ndarray | None = None  # [items]
    predictions: np.ndarray | None = None  # [items]
    labels: np.ndarray | None = None  # [items]
    logits: np.ndarray | None = None  # [items, labels]
    settings: dict[str, Any] = field(default_factory=dict)
    by_normalization: dict[str, float] | None = None
    finite: bool = True  # false: a score behind the items was NaN or infinite

    def check_finite(self, model: str) -> None:
        """Raise if the model computed NaN or infinity: such a value must not pass for a measurement."""
        values = (np.asarray(self.value), self.items, self.predictions, self.logits)
        if not self.finite or not all(np.isfinite(array).all() for array in values if array is not None):
            raise ModelError(
                f"{model} computes NaN or infinity on {self.data}, so its {self.metric} says nothing; check its "
                "weights and its dtype."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values, with the number of items instead of the items."""
        return {
            "metric": self.metric,
            "value": self.value,
            "higher_is_better": self.higher_is_better,
            "data": self.data,
            "items": len(self.items),
            "settings": dict(self.settings),
            **({"by_normalization": dict(self.by_normalization)} if self.by_normalization is not None else {}),
        }


def meets_threshold(quality: EvalResult, minimum: float | None = None, maximum: float | None = None) -> bool:
    """Return whether the value is at least the minimum (higher is better) or at most the maximum (perplexity)."""
    if minimum is not None and not quality.higher_is_better:
        raise DataError(f"A minimum makes no sense for {quality.metric}, where lower is better: give a maximum.")
    if maximum is not None and quality.higher_is_better:
        raise DataError(f"A maximum makes no sense for {quality.metric}, where higher is better: give a minimum.")
    # NaN must not pass, hence these comparisons instead of their negations.
    above = minimum is None or quality.value >= minimum
    return above and (maximum is None or quality.value <= maximum)
