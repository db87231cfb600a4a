"""Tangram's static budgets: what each head keeps was found once, over samples, and holds for all prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.budget import BudgetRule, by_layer, by_prompt, fitted, forced, reserved, total
from smelt.kvcache.eviction.profile import EvictionProfile, scale_budgets


@dataclass(frozen=True)
class StaticBudget(BudgetRule):
    """A head keeps what is kept in any case and the share B = mean + alpha * deviation of its other tokens.

    The B together are more than what the profile was asked to keep. Whether the paper rescales them is not known:
    with `rescale` they are scaled by one factor, none above 1, so that the total is what is asked; without, they are
    taken as they are, the total is theirs, and only the profile's own `keep` can be asked for.
    """

    name: ClassVar[str] = "static"
    paper: ClassVar[str] = "Kim et al., Tangram, 2026 (arXiv 2606.06302)"

    profile: EvictionProfile
    rescale: bool = True

    def counts(self, scores: Tensor, keep: float) -> Tensor:
        whole = total(scores, keep)
        layers, _, heads, tokens = scores.shape
        shape = self.profile.shape
        if (shape.num_layers, shape.num_kv_heads) != (layers, heads):
            raise ConfigError(
                f"static: the profile is for {shape.num_layers} layers of {shape.num_kv_heads} KV heads; this model "
                f"has {layers} of {heads}: profile this model."
            )
        low = by_prompt(forced(scores))  # [batch, layers * kv_heads]
        budgets = self.profile.budgets.to(scores.device).flatten()
        if self.rescale:
            room = tokens - low
            shares = (whole - low.sum(1)).clamp(min=0).double() / room.sum(1).clamp(min=1)  # [batch], of what may go
            ideal = low + room * torch.stack([scale_budgets(budgets, share) for share in shares.tolist()])
            return by_layer(fitted(ideal, low, tokens, whole), scores)
        if keep != self.profile.keep_ratio:
            raise ConfigError(
                f"static: the profile was made to keep {self.profile.keep_ratio:g}, not {keep:g}; ask for the same, or "
                f"have it rescaled with `rescale: true`."
            )
        whole_prompt = torch.ones_like(budgets)  # a profile's ratios leave out the window, so they never reach 1
        return by_layer(reserved(whole_prompt if keep == 1 else budgets, low, tokens), scores)
