"""HeadKV: a part of every head's budget goes into a pool that is shared by the heads' importance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.budget import BudgetRule, by_layer, by_prompt, fitted, forced, total


@dataclass(frozen=True)
class HeadKVBudget(BudgetRule):
    """With n tokens a head on average: a head of importance S (all of them sum to 1) keeps n - n / beta + S * pool,
    where pool = layers * kv_heads * n / beta. What a head cannot hold goes to the others in equal parts.

    The formula is given from memory and not checked against the paper or its code, beta "about 1.2" too. How the
    paper finds the importance, by a probe of retrieval and reasoning, is no part of this rule: it is given.
    """

    name: ClassVar[str] = "head"
    paper: ClassVar[str] = "Fu et al., Not All Heads Matter (HeadKV), 2024 (arXiv 2410.19258)"

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
                "head: importance must be one list a layer with one number a head of keys, none negative and not all 0."
            )

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        whole = total(scores, keep)
        layers, _, heads, tokens = scores.shape
        importance = torch.tensor(self.importance, dtype=torch.float64, device=scores.device)
        if importance.shape != (layers, heads):
            raise ConfigError(
                f"head: importance is given for {importance.shape[0]} layers of {importance.shape[1]} heads of keys; "
                f"this model has {layers} of {heads}: give the importance of its own heads."
            )
        low = by_prompt(forced(scores))  # [batch, layers * kv_heads]
        average, pool = whole / (layers * heads), whole / self.beta
        ideal = average - average / self.beta + (importance / importance.sum()).flatten() * pool
        return by_layer(fitted(ideal.expand(low.shape), low, tokens, whole), scores)
