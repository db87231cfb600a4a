"""The same count for every head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.kvcache.eviction.budget import BudgetRule, by_layer, by_prompt, fitted, forced, total


@dataclass(frozen=True)
class UniformBudget(BudgetRule):
    """Every head keeps int(tokens * keep)."""

    name: ClassVar[str] = "uniform"
    paper: ClassVar[str] = "none; what all scorers do where no rule is given"

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        whole = total(scores, keep)
        low = by_prompt(forced(scores))  # [batch, layers * kv_heads]
        each = whole // low.shape[1]
        return by_layer(fitted(torch.full_like(low, each), low, scores.shape[-1], whole), scores)
