"""A budget rule says how many tokens each head of each layer keeps of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError


@dataclass(frozen=True)
class BudgetRule(ABC):
    """Its fields are its parameters."""

    name: ClassVar[str]
    paper: ClassVar[str]

    @abstractmethod
    def counts(self, scores: Tensor, keep: float) -> Tensor:
        """From scores [layers, batch, kv_heads, tokens], infinite where a token is kept in any case, and the share of
        all tokens that is kept: how many each head keeps, [layers, batch, kv_heads], int64. No head keeps fewer than
        those that are kept in any case; together they keep `total(scores, keep)`, or as near to it as that allows."""


def check_keep(keep: float) -> None:
    if not 0 < keep <= 1:
        raise ConfigError(f"keep is {keep:g}; it is the share of a prompt that stays, above 0 and at most 1.")


def total(scores: Tensor, keep: float) -> int:
    """Tokens that all heads of all layers keep together, of one prompt."""
    check_keep(keep)
    layers, _, heads, tokens = scores.shape
    return layers * heads * int(tokens * keep)


def kept(scores: Tensor, counts: Tensor) -> Tensor:
    """Each head's own best tokens [layers, batch, kv_heads, tokens], bool; of equal scores the earlier ones."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    return rank < counts[..., None]


def forced(scores: Tensor) -> Tensor:
    """How many tokens each head keeps in any case: [layers, batch, kv_heads], int64."""
    return torch.isposinf(scores).sum(-1)


def by_prompt(counts: Tensor) -> Tensor:
    """[layers, batch, kv_heads] -> [batch, layers * kv_heads]"""
    return counts.transpose(0, 1).flatten(1)


def by_layer(rows: Tensor, like: Tensor) -> Tensor:
    """[batch, layers * kv_heads] -> [layers, batch, kv_heads], the first three sizes of `like`."""
    layers, _, heads = like.shape[:3]
    return rows.unflatten(1, (layers, heads)).transpose(0, 1).contiguous()


def reserved(budgets: Tensor, always: Tensor | int, tokens: int) -> Tensor:
    """Tokens a head is promised that keeps `always` of them and this share of the others, in whole tokens."""
    return always + _settled(budgets.double().clamp(0, 1) * (tokens - always)).ceil().long()


def fitted(ideal: Tensor, low: Tensor, high: Tensor | int, totals: Tensor | int) -> Tensor:
    """Whole counts between `low` and `high` that sum to `totals`, or to the nearest sum between these bounds.

    What the bounds take from or give to one count is shared equally by all others that have room. Fractions are
    rounded by largest remainder; of equal ones the earlier is rounded up. All are [rows, counts], totals [rows].
    """
    ideal = ideal.double()
    high = torch.as_tensor(high, device=low.device).expand_as(low)
    totals = torch.as_tensor(totals, device=low.device).expand(len(low)).clamp(low.sum(1), high.sum(1))
    below, above = (low - ideal).amin(1), (high - ideal).amax(1)  # shifts at which all counts are at a bound
    for _ in range(_HALVINGS):
        shift = (below + above) / 2
        short = (ideal + shift[:, None]).clamp(low, high).sum(1) < totals
        below, above = torch.where(short, shift, below), torch.where(short, above, shift)
    shares = _settled((ideal + above[:, None]).clamp(low, high))
    counts = shares.floor().long()
    rank = (shares - counts).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return counts + (rank < (totals - counts.sum(1))[:, None])


def best(scores: Tensor, totals: Tensor) -> Tensor:
    """How many tokens each head keeps, [rows, heads], where the best `totals` [rows] of scores [rows, heads, tokens]
    are kept, whoever they belong to; of equal scores those of earlier tokens, then those of earlier heads."""
    _, heads, _ = scores.shape
    order = scores.transpose(1, 2).flatten(1).argsort(dim=1, descending=True, stable=True)
    order = order[:, : int(totals.max())]
    chosen = torch.arange(order.shape[1], device=scores.device) < totals[:, None]
    return torch.zeros(len(scores), heads, dtype=torch.int64, device=scores.device).scatter_add_(
        1, order % heads, chosen.long()
    )


def _settled(values: Tensor) -> Tensor:
    """Without the noise of floating point, which would turn 3 tokens into 2.9999999 or 3.0000001."""
    return values.round(decimals=6)


_HALVINGS = 60
