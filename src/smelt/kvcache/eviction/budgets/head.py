"""HeadKV: part of every head's budget goes into a pool that is distributed by head importance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.budget import (
    BUDGET_RULES,
    BudgetRule,
    fit_counts,
    flatten_heads,
    num_forced,
    total_budget,
    unflatten_heads,
)


@BUDGET_RULES.register("head", paper="Fu et al., Not All Heads Matter (HeadKV), 2024 (arXiv 2410.19258)")
@dataclass(frozen=True)
class HeadKVBudget(BudgetRule):
    """Distribute the budget by a head importance measured beforehand.

    With n tokens per head on average, a head of importance S (summing to 1) retains n - n / beta + S * pool, where
    pool = layers * kv_heads * n / beta. What a head cannot hold goes to the others in equal parts.

    The formula, and beta "about 1.2", are from memory and not checked against the paper or its code. How the paper
    measures the importance, by a probe of retrieval and reasoning, is not part of this rule.
    """

    importance: Sequence[Sequence[float]]  # [layers, kv_heads], none negative
    beta: float = 1.2  # a head gives 1 / beta of its tokens to the pool

    def __post_init__(self) -> None:
        if not self.beta >= 1:
            raise ConfigError(f"head: beta is {self.beta:g}; it must be at least 1, such as 1.2.")
        try:
            values = torch.tensor(self.importance, dtype=torch.float64)
        except (TypeError, ValueError):
            values = torch.zeros(0)
        if values.dim() != 2 or not values.isfinite().all() or (values < 0).any() or not values.sum() > 0:
            raise ConfigError(
                "head: importance must be one list per layer with one number per KV head, none negative and not all 0."
            )

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        total = total_budget(scores, keep)
        layers, _, heads, tokens = scores.shape
        importance = torch.tensor(self.importance, dtype=torch.float64, device=scores.device)
        if importance.shape != (layers, heads):
            raise ConfigError(
                f"head: importance is given for {importance.shape[0]} layers of {importance.shape[1]} KV heads; "
                f"this model has {layers} of {heads}: give the importance of its own heads."
            )
        low = flatten_heads(num_forced(scores))  # [batch, layers * kv_heads]
        average, pool = total / (layers * heads), total / self.beta
        ideal = average - average / self.beta + (importance / importance.sum()).flatten() * pool
        return unflatten_heads(fit_counts(ideal.expand(low.shape), low, tokens, total), scores)
