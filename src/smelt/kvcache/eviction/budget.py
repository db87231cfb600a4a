"""Budget rules: how many tokens of a prompt each KV head of each layer retains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.registry import Registry


@dataclass(frozen=True)
class BudgetRule(ABC):
    """Base class; fields are parameters."""

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def counts(self, scores: Tensor, keep: float) -> Tensor:
        """Return how many tokens each head retains: [layers, batch, kv_heads], int64.

        Scores are [layers, batch, kv_heads, tokens], infinite where a token is always retained; `keep` is the ratio of
        all tokens to retain. No head retains fewer than its forced tokens; together they retain `total_budget(scores,
        keep)`, or as near to it as that allows."""


BUDGET_RULES: Registry[BudgetRule] = Registry("budget rule")


def check_keep(keep: float) -> None:
    if not 0 < keep <= 1:
        raise ConfigError(f"keep is {keep:g}; it is the share of a prompt to retain, above 0 and at most 1.")


def total_budget(scores: Tensor, keep: float) -> int:
    """Return how many tokens all heads of all layers retain of one prompt."""
    check_keep(keep)
    layers, _, heads, tokens = scores.shape
    return layers * heads * int(tokens * keep)


def retained_mask(scores: Tensor, counts: Tensor) -> Tensor:
    """Return a mask of each head's best tokens [layers, batch, kv_heads, tokens]; earlier tokens win ties."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    return rank < counts[..., None]


def num_forced(scores: Tensor) -> Tensor:
    """Return how many tokens each head always retains: [layers, batch, kv_heads], int64."""
    return torch.isposinf(scores).sum(-1)


def flatten_heads(counts: Tensor) -> Tensor:
    """Reshape [layers, batch, kv_heads] to [batch, layers * kv_heads]."""
    return counts.transpose(0, 1).flatten(1)


def unflatten_heads(rows: Tensor, like: Tensor) -> Tensor:
    """Reshape [batch, layers * kv_heads] to [layers, batch, kv_heads], the first three sizes of `like`."""
    layers, _, heads = like.shape[:3]
    return rows.unflatten(1, (layers, heads)).transpose(0, 1).contiguous()


def reserved_tokens(budgets: Tensor, always: Tensor | int, tokens: int) -> Tensor:
    """Return how many tokens to reserve for a head that retains `always` tokens and the ratio `budgets` of the others,
    rounded up."""
    return always + _denoised(budgets.double().clamp(0, 1) * (tokens - always)).ceil().long()


def fit_counts(ideal: Tensor, low: Tensor, high: Tensor | int, totals: Tensor | int) -> Tensor:
    """Round to integer counts between `low` and `high` that sum to `totals`, or to the nearest possible sum.

    What the bounds take from or give to one count is shared equally by all others within bounds. Fractions are rounded
    by largest remainder; of equal ones the earlier is rounded up. All are [rows, counts], totals [rows].
    """
    ideal = ideal.double()
    high = torch.as_tensor(high, device=low.device).expand_as(low)
    totals = torch.as_tensor(totals, device=low.device).expand(len(low)).clamp(low.sum(1), high.sum(1))
    below, above = (low - ideal).amin(1), (high - ideal).amax(1)  # shifts at which all counts are at a bound
    for _ in range(_BISECTIONS):
        shift = (below + above) / 2
        short = (ideal + shift[:, None]).clamp(low, high).sum(1) < totals
        below, above = torch.where(short, shift, below), torch.where(short, above, shift)
    shares = _denoised((ideal + above[:, None]).clamp(low, high))
    counts = shares.floor().long()
    rank = (shares - counts).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return counts + (rank < (totals - counts.sum(1))[:, None])


def topk_counts(scores: Tensor, totals: Tensor) -> Tensor:
    """Count each head's tokens among the best `totals` [rows] of scores [rows, heads, tokens]: [rows, heads].

    Of equal scores earlier tokens win, then earlier heads."""
    _, heads, _ = scores.shape
    order = scores.transpose(1, 2).flatten(1).argsort(dim=1, descending=True, stable=True)
    order = order[:, : int(totals.max())]
    selected = torch.arange(order.shape[1], device=scores.device) < totals[:, None]
    return torch.zeros(len(scores), heads, dtype=torch.int64, device=scores.device).scatter_add_(
        1, order % heads, selected.long()
    )


def _denoised(values: Tensor) -> Tensor:
    """Remove floating-point noise, which would turn 3 tokens into 2.9999999 or 3.0000001."""
    return values.round(decimals=6)


_BISECTIONS = 60
