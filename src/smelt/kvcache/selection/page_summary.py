"""What is remembered of a page, so that it can be judged without being read: two vectors for each head of keys.

Digests are taken of keys as they lie in the cache, after rotary positions, and of full pages only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError


@dataclass(frozen=True)
class PageSummary(ABC):
    """A box around the keys of a page, or around most of them."""

    name: ClassVar[str]
    paper: ClassVar[str]

    @abstractmethod
    def box(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The high and the low corner, [..., width] each, of the keys [..., tokens, width] of full pages."""


@dataclass(frozen=True)
class Quest(PageSummary):
    """high = max_t k_t, low = min_t k_t: no key of the page lies outside. The paper's pages have 16 tokens [memory]."""

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "Tang et al., Quest, ICML 2024 (arXiv 2406.10774)"

    def box(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        return keys.amax(-2), keys.amin(-2)


@dataclass(frozen=True)
class ArkVale(PageSummary):
    """Cuboid-mean: with the centre c = (max_t k_t + min_t k_t) / 2, high and low = c +- mean_t |k_t - c|. One far key
    does not widen the box much, and so it may lie outside. The paper's pages have 32 tokens."""

    name: ClassVar[str] = "arkvale"
    paper: ClassVar[str] = "Chen et al., ArkVale, NeurIPS 2024"

    def box(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        exact = keys.float()
        centre = (exact.amax(-2) + exact.amin(-2)) / 2
        distance = (exact - centre.unsqueeze(-2)).abs().mean(-2)
        return (centre + distance).to(keys.dtype), (centre - distance).to(keys.dtype)


PAGE_SUMMARIES: dict[str, type[PageSummary]] = {digest.name: digest for digest in (Quest, ArkVale)}


def make_page_summary(name: str) -> PageSummary:
    if name not in PAGE_SUMMARIES:
        raise ConfigError(f"there is no page digest {name!r}; there are {', '.join(PAGE_SUMMARIES)}.")
    return PAGE_SUMMARIES[name]()


def page_scores(queries: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """sum_d max(q_d high_d, q_d low_d), summed over the queries of a group: what a key in the box could give at most.

    Queries [requests, kv_heads, group, width], corners [requests, pages, kv_heads, width] -> [requests, kv_heads,
    pages], float32. As high >= low, the larger product has the high corner where q_d > 0 and the low one elsewhere, so
    that the sum over the group can be taken before the product with a page.
    """
    exact = queries.float()
    positive, negative = exact.clamp(min=0).sum(2), exact.clamp(max=0).sum(2)  # [requests, kv_heads, width]
    upper = high.float().permute(0, 2, 1, 3) @ positive.unsqueeze(-1)
    lower = low.float().permute(0, 2, 1, 3) @ negative.unsqueeze(-1)
    return (upper + lower).squeeze(-1)


LayerHeads = Mapping[int, tuple[int, int]]  # layer -> heads of keys, and their width


class PageSummaryTable:
    """High and low corners of each layer's pages, [blocks, kv_heads, width], on the device that judges them."""

    def __init__(
        self, digest: PageSummary, heads: LayerHeads, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.digest = digest
        self._high, self._low = (
            {layer: torch.zeros(blocks, *shape, dtype=dtype, device=device) for layer, shape in heads.items()}
            for _ in range(2)
        )

    @property
    def nbytes(self) -> int:
        return sum(corner.nbytes for corners in (self._high, self._low) for corner in corners.values())

    def update(self, layer: int, blocks: Tensor, keys: Tensor) -> None:
        """These blocks [n] are full now; their keys are [n, kv_heads, tokens, width]."""
        high, low = self.digest.box(keys)
        blocks = blocks.to(high.device)
        self._high[layer].index_copy_(0, blocks, high)
        self._low[layer].index_copy_(0, blocks, low)

    def scores(self, layer: int, queries: Tensor, tables: Tensor) -> Tensor:
        """Of queries [requests, kv_heads, group, width] for their pages [requests, pages]: [requests, kv_heads,
        pages]. What it says about a page that is not full means nothing."""
        return page_scores(queries, self._high[layer][tables], self._low[layer][tables])
