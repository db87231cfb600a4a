"""PyramidKV: early layers retain more than late ones, in equal steps."""

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
    total_budget,
    unflatten_heads,
)


@BUDGET_RULES.register("pyramid", paper="Cai et al., PyramidKV, 2024 (arXiv 2406.02069)")
@dataclass(frozen=True)
class PyramidKVBudget(BudgetRule):
    """Give early layers more than late ones; for models whose late layers attend to few tokens.

    With n tokens per head on average, w forced tokens and L layers: heads of the last layer retain min = n / beta,
    those of the first max = 2 n - min; where max > tokens - w, max = tokens - w and min = 2 n - max. Layer i retains
    max - i (max - min) / (L - 1). Where w <= min <= max <= tokens fails, all layers retain n. Counts are rounded so
    that the total is exact, which rounding each layer is not.

    In the paper w is the window of its scorer; here it is all forced tokens, the sink too.
    """

    beta: float = 20.0  # ratio of the average to what the last layer retains

    def __post_init__(self) -> None:
        if not self.beta >= 1:
            raise ConfigError(f"pyramid: beta is {self.beta:g}; it must be at least 1, such as 20.")

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        total = total_budget(scores, keep)
        layers, _, heads, tokens = scores.shape
        low = flatten_heads(num_forced(scores))  # [batch, layers * kv_heads]
        always = low.amax(1).double()  # [batch]
        average = float(total // (layers * heads))
        largest = torch.minimum(torch.full_like(always, 2 * average - average / self.beta), tokens - always)
        smallest = 2 * average - largest
        ordered = (always <= smallest) & (smallest <= largest) & (largest <= tokens)
        steps = torch.linspace(0, 1, layers, dtype=torch.float64, device=scores.device)
        slope = largest[:, None] - steps * (largest - smallest)[:, None]  # [batch, layers]
        ideal = torch.where(ordered[:, None], slope, average)
        by_layer = fit_counts(ideal, torch.zeros_like(ideal).long(), tokens, total // heads)
        return unflatten_heads(fit_counts(by_layer.repeat_interleave(heads, 1), low, tokens, total), scores)
