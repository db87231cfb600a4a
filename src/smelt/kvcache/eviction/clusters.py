"""Heads that keep alike share pages: the map (layer, head) <-> (cluster, column), and what sharing costs.

Tangram (Kim et al., 2026, arXiv 2606.06302): a page holds a block of tokens of all heads of a cluster, so a cluster
keeps what the greediest of its heads keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.budget import reserved

SCOPES = ("global", "per_layer", "adjacent")

Cell = tuple[int, int]  # layer and head


@dataclass(frozen=True)
class HeadClusters:
    """Every head of every layer in one cluster, all clusters of one size. The place in its cluster, where members are
    in order of layer and head, is a head's column."""

    num_layers: int
    num_kv_heads: int
    members: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        cells = {(layer, head) for layer in range(self.num_layers) for head in range(self.num_kv_heads)}
        found = [cell for cluster in self.members for cell in cluster]
        if len(found) != len(cells) or set(found) != cells:
            raise ConfigError("a map of clusters must hold every head of every layer exactly once.")
        if len({len(cluster) for cluster in self.members}) != 1:
            raise ConfigError("a map of clusters must have as many heads in one cluster as in any other.")
        if any(list(cluster) != sorted(cluster) for cluster in self.members):
            raise ConfigError("the heads of a cluster must be in order of layer and head.")

    @property
    def size(self) -> int:
        """Heads of a cluster."""
        return len(self.members[0])

    @cached_property
    def cells(self) -> Tensor:
        """layer * kv_heads + head: [clusters, columns], int64"""
        return torch.tensor([[layer * self.num_kv_heads + head for layer, head in cluster] for cluster in self.members])

    @cached_property
    def cluster(self) -> Tensor:
        """[layers, kv_heads], int64"""
        return self._places // self.size

    @cached_property
    def column(self) -> Tensor:
        """[layers, kv_heads], int64"""
        return self._places % self.size

    @cached_property
    def _places(self) -> Tensor:
        return self.cells.flatten().argsort().view(self.num_layers, self.num_kv_heads)

    def cluster_max(self, amounts: Tensor) -> Tensor:
        """What each cluster keeps: the most of what its heads do. [layers, kv_heads] -> [clusters]"""
        return amounts.flatten()[self.cells.to(amounts.device)].amax(1)


def cluster_heads(ratios: Tensor, size: int, scope: str = "global") -> HeadClusters:
    """Clusters of `size` heads from the share that each keeps [layers, kv_heads], the greediest first, of equals the
    earlier: over all layers (`global`), within each (`per_layer`), or neighbours as they lie (`adjacent`)."""
    if scope not in SCOPES:
        raise ConfigError(f"clusters are made {', '.join(SCOPES)}, not {scope!r}.")
    layers, heads = ratios.shape
    whole, where = (heads, "a layer's heads") if scope == "per_layer" else (layers * heads, "all heads")
    if size < 1 or whole % size:
        good = ", ".join(str(number) for number in range(1, whole + 1) if whole % number == 0)
        raise ConfigError(f"clusters of {size} do not divide the {whole} of {where}; take one of {good}.")
    flat = ratios.double().cpu().flatten()
    if scope == "adjacent":
        order = torch.arange(len(flat))
    elif scope == "per_layer":
        inside = flat.view(layers, heads).argsort(dim=1, descending=True, stable=True)
        order = (inside + heads * torch.arange(layers)[:, None]).flatten()
    else:
        order = flat.argsort(descending=True, stable=True)
    groups = order.view(-1, size).sort(1).values.tolist()
    return HeadClusters(layers, heads, tuple(tuple(divmod(cell, heads) for cell in group) for group in groups))


def pages(budgets: Tensor, tokens: int, sink: int, window: int, block: int) -> Tensor:
    """Pages that a prompt's head or cluster takes: ceil((sink + window + B * (tokens - sink - window)) / block)."""
    kept = reserved(budgets, min(sink + window, tokens), tokens)
    return (kept + block - 1) // block


@dataclass(frozen=True)
class SharingOverhead:
    """What is kept, in the unit of what was given (shares, tokens, or pages of one head)."""

    ideal: float  # every head for itself
    kept: float  # clusters, each as much as its greediest head
    monolithic: float  # all heads as much as the greediest of all

    @property
    def over(self) -> float:
        """Times the ideal."""
        return self.kept / self.ideal


def sharing_overhead(amounts: Tensor, by: HeadClusters) -> SharingOverhead:
    """What sharing pages costs, from what each head keeps for itself: [layers, kv_heads]."""
    return SharingOverhead(
        ideal=amounts.sum().item(),
        kept=by.cluster_max(amounts).sum().item() * by.size,
        monolithic=amounts.max().item() * amounts.numel(),
    )


def splits_per_cluster(budgets: Tensor, most: int = 64) -> Tensor:
    """For each cluster's budget [clusters]: its number of splits, from 1 to `most`, int64."""
    if most < 1:
        raise ConfigError(f"keys are split into at least 1 part, not {most}.")
    shares = (most * budgets.double().clamp(0, 1)).round(decimals=6)  # 0.3 * 10 is 3, not 2.9999999
    return (shares.floor() + 1).clamp(max=most).long()
