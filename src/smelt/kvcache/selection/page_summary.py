"""Page summaries: two vectors per page and KV head, from which a page is scored without reading its keys.

Summaries are computed from cached keys (after RoPE), and from full pages only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.registry import Registry

LayerHeads = Mapping[int, tuple[int, int]]  # layer -> (kv_heads, head_dim)


@dataclass(frozen=True)
class PageSummary(ABC):
    """Bounding box of the keys of a page, or of most of them."""

    name: ClassVar[str]
    paper: ClassVar[str]

    @abstractmethod
    def box(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the upper and lower corner, [..., head_dim] each, of keys [..., tokens, head_dim] of full pages."""


PAGE_SUMMARIES: Registry[PageSummary] = Registry("page summary")


@PAGE_SUMMARIES.register("quest", paper="Tang et al., Quest, ICML 2024 (arXiv 2406.10774)")
@dataclass(frozen=True)
class Quest(PageSummary):
    """Per-channel maximum and minimum of the keys: no key lies outside. The paper uses pages of 16 tokens."""

    def box(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        return keys.amax(-2), keys.amin(-2)


@PAGE_SUMMARIES.register("arkvale", paper="Chen et al., ArkVale, NeurIPS 2024")
@dataclass(frozen=True)
class ArkVale(PageSummary):
    """Cuboid-mean: with the center c = (max_t k_t + min_t k_t) / 2, the corners are c +- mean_t |k_t - c|.

    An outlier key hardly widens the box, so it may lie outside. The paper uses pages of 32 tokens."""

    def box(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        exact = keys.float()
        center = (exact.amax(-2) + exact.amin(-2)) / 2
        distance = (exact - center.unsqueeze(-2)).abs().mean(-2)
        return (center + distance).to(keys.dtype), (center - distance).to(keys.dtype)


def page_scores(queries: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
    """Return an upper bound of the logits of a page: sum_d max(q_d upper_d, q_d lower_d), summed over the query group.

    Queries [requests, kv_heads, group, head_dim], corners [requests, pages, kv_heads, head_dim] -> [requests,
    kv_heads, pages], float32. As upper >= lower, the larger product takes the upper corner where q_d > 0 and the lower
    one elsewhere, so the group can be summed before the product with a page.
    """
    exact = queries.float()
    positive, negative = exact.clamp(min=0).sum(2), exact.clamp(max=0).sum(2)  # [requests, kv_heads, head_dim]
    from_upper = upper.float().permute(0, 2, 1, 3) @ positive.unsqueeze(-1)
    from_lower = lower.float().permute(0, 2, 1, 3) @ negative.unsqueeze(-1)
    return (from_upper + from_lower).squeeze(-1)


class PageSummaryTable:
    """Summaries of all pages of a KV cache: corners [blocks, kv_heads, head_dim] per layer, on the compute device.

    Each page is summarized once, when its last token is written. Summaries belong to blocks, not to requests: requests
    that share pages share summaries, and nothing is freed when a request ends. The summary of a block that is being
    refilled is stale; only full pages are scored.
    """

    def __init__(
        self, summary: PageSummary, heads: LayerHeads, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.summary = summary
        self._upper, self._lower = (
            {layer: torch.zeros(num_blocks, *shape, dtype=dtype, device=device) for layer, shape in heads.items()}
            for _ in range(2)
        )

    @property
    def nbytes(self) -> int:
        return sum(corner.nbytes for corners in (self._upper, self._lower) for corner in corners.values())

    def update(self, layer: int, block_ids: Tensor, keys: Tensor) -> None:
        """Summarize blocks [n] that are full now, from their keys [n, kv_heads, tokens, head_dim]."""
        upper, lower = self.summary.box(keys)
        block_ids = block_ids.to(upper.device)
        self._upper[layer].index_copy_(0, block_ids, upper)
        self._lower[layer].index_copy_(0, block_ids, lower)

    def scores(self, layer: int, queries: Tensor, block_tables: Tensor) -> Tensor:
        """Score the pages [requests, pages] of queries [requests, kv_heads, group, head_dim]: [requests, kv_heads,
        pages]. Scores of partly filled pages are meaningless."""
        return page_scores(queries, self._upper[layer][block_tables], self._lower[layer][block_tables])
