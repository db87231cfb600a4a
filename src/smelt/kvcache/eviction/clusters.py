"""Clusters of heads that share pages: the map (layer, head) <-> (cluster, column), and the memory overhead of sharing.

Tangram (Kim et al., 2026, arXiv 2606.06302): a page holds a block of tokens of all heads of a cluster, so a cluster
retains as many tokens as its largest head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.budget import reserved_tokens

SCOPES = ("global", "per_layer", "adjacent")

LayerHead = tuple[int, int]


@dataclass(frozen=True)
class HeadClusters:
    """Clusters of equal size that cover every head of every layer. Members are ordered by layer and head; a head's
    index in its cluster is its column."""

    num_layers: int
    num_kv_heads: int
    members: tuple[tuple[LayerHead, ...], ...]

    def __post_init__(self) -> None:
        heads = {(layer, head) for layer in range(self.num_layers) for head in range(self.num_kv_heads)}
        listed = [member for cluster in self.members for member in cluster]
        if len(listed) != len(heads) or set(listed) != heads:
            raise ConfigError("a map of clusters must hold every head of every layer exactly once.")
        if len({len(cluster) for cluster in self.members}) != 1:
            raise ConfigError("a map of clusters must have as many heads in one cluster as in any other.")
        if any(list(cluster) != sorted(cluster) for cluster in self.members):
            raise ConfigError("the heads of a cluster must be in order of layer and head.")

    @property
    def size(self) -> int:
        """Heads per cluster."""
        return len(self.members[0])

    @cached_property
    def head_indices(self) -> Tensor:
        """layer * kv_heads + head: [clusters, columns], int64"""
        return torch.tensor([[layer * self.num_kv_heads + head for layer, head in cluster] for cluster in self.members])

    @cached_property
    def cluster(self) -> Tensor:
        """Cluster of each head: [layers, kv_heads], int64"""
        return self._positions // self.size

    @cached_property
    def column(self) -> Tensor:
        """Column of each head in its cluster: [layers, kv_heads], int64"""
        return self._positions % self.size

    @cached_property
    def _positions(self) -> Tensor:
        return self.head_indices.flatten().argsort().view(self.num_layers, self.num_kv_heads)

    def cluster_max(self, amounts: Tensor) -> Tensor:
        """Return the maximum over the heads of each cluster: [layers, kv_heads] -> [clusters]."""
        return amounts.flatten()[self.head_indices.to(amounts.device)].amax(1)


def cluster_heads(ratios: Tensor, size: int, scope: str = "global") -> HeadClusters:
    """Cluster heads by the ratio each retains [layers, kv_heads], largest first, earlier heads first among equals.

    `scope`: over all layers (`global`), within each layer (`per_layer`), or neighboring heads (`adjacent`)."""
    if scope not in SCOPES:
        raise ConfigError(f"clusters are made {', '.join(SCOPES)}, not {scope!r}.")
    layers, heads = ratios.shape
    num_heads, which = (heads, "a layer's heads") if scope == "per_layer" else (layers * heads, "all heads")
    if size < 1 or num_heads % size:
        divisors = ", ".join(str(number) for number in range(1, num_heads + 1) if num_heads % number == 0)
        raise ConfigError(f"clusters of {size} do not divide the {num_heads} of {which}; take one of {divisors}.")
    flat = ratios.double().cpu().flatten()
    if scope == "adjacent":
        order = torch.arange(len(flat))
    elif scope == "per_layer":
        within = flat.view(layers, heads).argsort(dim=1, descending=True, stable=True)
        order = (within + heads * torch.arange(layers)[:, None]).flatten()
    else:
        order = flat.argsort(descending=True, stable=True)
    clusters = order.view(-1, size).sort(1).values.tolist()
    return HeadClusters(layers, heads, tuple(tuple(divmod(head, heads) for head in cluster) for cluster in clusters))


def num_pages(budgets: Tensor, tokens: int, sink: int, window: int, block_size: int) -> Tensor:
    """Return the pages of a head or cluster for a prompt: ceil((sink + window + B * (tokens - sink - window)) /
    block_size)."""
    retained = reserved_tokens(budgets, min(sink + window, tokens), tokens)
    return (retained + block_size - 1) // block_size


@dataclass(frozen=True)
class SharingOverhead:
    """Memory in the unit of the amounts (ratios, tokens, or pages of one head)."""

    ideal: float  # every head for itself
    clustered: float  # every cluster as much as its largest head
    monolithic: float  # all heads as much as the largest of all

    @property
    def ratio(self) -> float:
        """Clustered over ideal."""
        return self.clustered / self.ideal


def sharing_overhead(amounts: Tensor, clusters: HeadClusters) -> SharingOverhead:
    """Compute the overhead of sharing pages from what each head would retain alone: [layers, kv_heads]."""
    return SharingOverhead(
        ideal=amounts.sum().item(),
        clustered=clusters.cluster_max(amounts).sum().item() * clusters.size,
        monolithic=amounts.max().item() * amounts.numel(),
    )


def splits_per_cluster(budgets: Tensor, max_splits: int = 64) -> Tensor:
    """Return the KV splits in decode attention for each cluster's budget [clusters]: from 1 to `max_splits`, int64.

    Tangram assigns thread blocks in proportion to budgets, which are ratios of a prompt and so hold for every request.
    A figure shows 8, 5 and 3 splits for budgets of 100, 50 and 25 %; the rule behind it is not known. Ours,
    min(floor(max_splits * budget) + 1, max_splits), gives these three with 8; a larger maximum is finer."""
    if max_splits < 1:
        raise ConfigError(f"keys are split into at least 1 part, not {max_splits}.")
    shares = (max_splits * budgets.double().clamp(0, 1)).round(decimals=6)  # 0.3 * 10 is 3, not 2.9999999
    return (shares.floor() + 1).clamp(max=max_splits).long()
