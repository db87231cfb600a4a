"""AdaKV: the heads of a layer share its budget by one threshold, and each keeps a protected part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.budget import BudgetRule, best, by_layer, by_prompt, fitted, forced, kept, total


@dataclass(frozen=True)
class AdaKVBudget(BudgetRule):
    """Each head's best int(n * safeguard) of its n tokens are protected; of the others of a layer, whichever head they
    belong to, the best are kept until the layer keeps n tokens a head."""

    name: ClassVar[str] = "ada"
    paper: ClassVar[str] = "Feng et al., Ada-KV, 2024 (arXiv 2407.11550)"

    safeguard: float = 0.20  # share of an equal budget that no head can lose

    def __post_init__(self) -> None:
        if not 0 <= self.safeguard <= 1:
            raise ConfigError(f"ada: safeguard is {self.safeguard:g}; it is a share between 0 and 1, such as 0.2.")

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        whole = total(scores, keep)
        layers, batch, heads, tokens = scores.shape
        low = by_prompt(forced(scores))  # [batch, layers * kv_heads]
        safe = low.clamp(min=int(whole // (layers * heads) * self.safeguard))
        safe = fitted(safe, low, tokens, safe.sum(1).clamp(max=whole))  # what is kept in any case comes first
        layer_low = safe.unflatten(1, (layers, heads)).sum(2)  # [batch, layers]
        layer_totals = fitted(torch.full_like(layer_low, whole // layers), layer_low, heads * tokens, whole)
        protected = scores.masked_fill(kept(scores, by_layer(safe, scores)), torch.inf)
        return best(protected.flatten(0, 1), layer_totals.t().flatten()).view(layers, batch, heads)
