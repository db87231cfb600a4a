"""PyramidKV: early layers keep more than late ones, in equal steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.budget import BudgetRule, by_layer, by_prompt, fitted, forced, total


@dataclass(frozen=True)
class PyramidKVBudget(BudgetRule):
    """With n tokens a head on average, w tokens that are kept in any case and L layers: the last layer's heads keep
    min = n / beta, the first one's max = 2 n - min; where max > tokens - w, max = tokens - w and min = 2 n - max.
    Layer i keeps max - i (max - min) / (L - 1). Where w <= min <= max <= tokens fails, all layers keep n. All are
    rounded so that the total is exact, which a plain rounding of each layer is not.

    In the paper w is the window of its scorer; here it is all that is kept in any case, the first tokens too.
    """

    name: ClassVar[str] = "pyramid"
    paper: ClassVar[str] = "Cai et al., PyramidKV, 2024 (arXiv 2406.02069)"

    beta: float = 20.0  # how many times fewer the last layer keeps than the average

    def __post_init__(self) -> None:
        if not self.beta >= 1:
            raise ConfigError(f"pyramid: beta is {self.beta:g}; it must be at least 1, such as 20.")

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        whole = total(scores, keep)
        layers, _, heads, tokens = scores.shape
        low = by_prompt(forced(scores))  # [batch, layers * kv_heads]
        always = low.amax(1).double()  # [batch]
        average = float(whole // (layers * heads))
        largest = torch.minimum(torch.full_like(always, 2 * average - average / self.beta), tokens - always)
        smallest = 2 * average - largest
        ordered = (always <= smallest) & (smallest <= largest) & (largest <= tokens)
        steps = torch.linspace(0, 1, layers, dtype=torch.float64, device=scores.device)
        slope = largest[:, None] - steps * (largest - smallest)[:, None]  # [batch, layers]
        ideal = torch.where(ordered[:, None], slope, average)
        by_layers = fitted(ideal, torch.zeros_like(ideal).long(), tokens, whole // heads)
        return by_layer(fitted(by_layers.repeat_interleave(heads, 1), low, tokens, whole), scores)
