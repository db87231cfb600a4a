"""KVzip's budget rule: one score threshold over all layers, heads and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from smelt.kvcache.eviction.budget import (
    BUDGET_RULES,
    BudgetRule,
    flatten_heads,
    num_forced,
    topk_counts,
    total_budget,
    unflatten_heads,
)


@BUDGET_RULES.register("global-topk", paper="Kim et al., KVzip, 2025 (arXiv 2505.23416)")
@dataclass(frozen=True)
class GlobalTopKBudget(BudgetRule):
    """Retain the best scores of the whole model; use it with scorers whose layers have one scale, such as kvzip.

    No head is protected, and a layer with larger scores takes the budget of the others."""

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        totals = flatten_heads(num_forced(scores)).sum(1).clamp(min=total_budget(scores, keep))  # [batch]
        return unflatten_heads(topk_counts(scores.transpose(0, 1).flatten(1, 2), totals), scores)
