"""Tangram static budgets: the ratio each head retains is profiled once and fixed for all prompts."""

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
    reserved_tokens,
    total_budget,
    unflatten_heads,
)
from smelt.kvcache.eviction.profile import EvictionProfile, scale_budgets


@BUDGET_RULES.register("static", paper="Kim et al., Tangram, 2026 (arXiv 2606.06302)")
@dataclass(frozen=True)
class StaticBudget(BudgetRule):
    """Use the budgets of a profile; they are known before the prompt, so a server can reserve pages.

    A head retains its forced tokens and the ratio B = mean + alpha * std of the others. Together the B exceed the
    profile's keep_ratio. Whether the paper rescales them is not known: with `rescale` they are scaled by one factor,
    none above 1, to the requested total; without, they are used as they are, and only the profile's own keep_ratio can
    be requested.
    """

    profile: EvictionProfile
    rescale: bool = True

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        total = total_budget(scores, keep)
        layers, _, heads, tokens = scores.shape
        shape = self.profile.shape
        if (shape.num_layers, shape.num_kv_heads) != (layers, heads):
            raise ConfigError(
                f"static: the profile is for {shape.num_layers} layers of {shape.num_kv_heads} KV heads; this model "
                f"has {layers} of {heads}: profile this model."
            )
        low = flatten_heads(num_forced(scores))  # [batch, layers * kv_heads]
        budgets = self.profile.budgets.to(scores.device).flatten()
        if self.rescale:
            evictable = tokens - low
            ratios = (total - low.sum(1)).clamp(min=0).double() / evictable.sum(1).clamp(min=1)  # [batch]
            ideal = low + evictable * torch.stack([scale_budgets(budgets, ratio) for ratio in ratios.tolist()])
            return unflatten_heads(fit_counts(ideal, low, tokens, total), scores)
        if keep != self.profile.keep_ratio:
            raise ConfigError(
                f"static: the profile was made to keep {self.profile.keep_ratio:g}, not {keep:g}; ask for the same, or "
                f"have it rescaled with `rescale: true`."
            )
        all_tokens = torch.ones_like(budgets)  # a profile's ratios leave out the window, so they never reach 1
        return unflatten_heads(reserved_tokens(all_tokens if keep == 1 else budgets, low, tokens), scores)
