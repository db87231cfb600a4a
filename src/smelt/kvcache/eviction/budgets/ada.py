"""AdaKV: the heads of a layer share its budget by one score threshold, with a protected minimum per head."""

from __future__ import annotations

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
    retained_mask,
    topk_counts,
    total_budget,
    unflatten_heads,
)


@BUDGET_RULES.register("ada", paper="Feng et al., Ada-KV, 2024 (arXiv 2407.11550)")
@dataclass(frozen=True)
class AdaKVBudget(BudgetRule):
    """Share each layer's budget among its heads by score; a good default.

    Of n tokens per head, each head's best int(n * safeguard) are protected; of the others of the layer, from whichever
    head, the best are retained until the layer holds n tokens per head."""

    safeguard: float = 0.20  # share of an equal budget that no head can lose

    def __post_init__(self) -> None:
        if not 0 <= self.safeguard <= 1:
            raise ConfigError(f"ada: safeguard is {self.safeguard:g}; it is a share between 0 and 1, such as 0.2.")

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        total = total_budget(scores, keep)
        layers, batch, heads, tokens = scores.shape
        low = flatten_heads(num_forced(scores))  # [batch, layers * kv_heads]
        safe = low.clamp(min=int(total // (layers * heads) * self.safeguard))
        safe = fit_counts(safe, low, tokens, safe.sum(1).clamp(max=total))  # forced tokens come first
        layer_low = safe.unflatten(1, (layers, heads)).sum(2)  # [batch, layers]
        layer_totals = fit_counts(torch.full_like(layer_low, total // layers), layer_low, heads * tokens, total)
        protected = scores.masked_fill(retained_mask(scores, unflatten_heads(safe, scores)), torch.inf)
        return topk_counts(protected.flatten(0, 1), layer_totals.t().flatten()).view(layers, batch, heads)
