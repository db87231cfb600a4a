"""Uniform budget: the same count for every head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.kvcache.eviction.budget import (
    BUDGET_RULES,
    BudgetRule,
    fit_counts,
    flatten_heads,
    num_forced,
    total_budget,
    unflatten_heads,
)


@BUDGET_RULES.register("uniform", paper="none; what all scorers do where no rule is given")
@dataclass(frozen=True)
class UniformBudget(BudgetRule):
    """Retain int(tokens * keep) tokens in every head; the baseline."""

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        total = total_budget(scores, keep)
        low = flatten_heads(num_forced(scores))  # [batch, layers * kv_heads]
        per_head = total // low.shape[1]
        return unflatten_heads(fit_counts(torch.full_like(low, per_head), low, scores.shape[-1], total), scores)
