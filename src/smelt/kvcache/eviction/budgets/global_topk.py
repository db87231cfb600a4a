"""KVzip's rule: one threshold over all layers, heads and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from smelt.kvcache.eviction.budget import BudgetRule, best, by_layer, by_prompt, forced, total


@dataclass(frozen=True)
class GlobalTopKBudget(BudgetRule):
    """The lowest scores go, wherever they are; no head is protected. Scores of all layers must have one scale: a layer
    with larger scores takes the budget of the others."""

    name: ClassVar[str] = "everywhere"
    paper: ClassVar[str] = "Kim et al., KVzip, 2025 (arXiv 2505.23416)"

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        totals = by_prompt(forced(scores)).sum(1).clamp(min=total(scores, keep))  # [batch]
        return by_layer(best(scores.transpose(0, 1).flatten(1, 2), totals), scores)
