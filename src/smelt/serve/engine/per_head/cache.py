"""Pages of clusters: one pool for all layers, [page, column, token, width], so that every head is a cache of its own.

Tangram (Kim et al., 2026, arXiv 2606.06302): with the column outside the tokens, page * columns + column is a block of
an ordinary paged cache with one head of keys. Behind the pool's pages lie those of the staging area, which hold what a
chunk has not decided about yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.kernels.attention_metadata import LayerKVPages
from smelt.kernels.kv_quant import KVQuantFormat, row_layout
from smelt.kernels.paged import allocate_kv_pages
from smelt.kvcache.eviction.clusters import HeadClusters


@dataclass(frozen=True)
class PerHeadCache:
    """Where the tokens of every request, cluster and head lie. The last row of tables and shifts is for padding."""

    keys: Tensor  # [pages * columns, size, 1, width], or bytes of rows in place of the width
    values: Tensor
    tables: Tensor  # [slots + 1, clusters, most pages], int32
    shifts: Tensor  # [slots + 1, clusters], int32: tokens that a cluster holds, less those of the text
    cluster: Tensor  # [layers, kv_heads], int64: of each head
    column: Tensor  # [layers, kv_heads], int64
    clusters: HeadClusters
    staging: range  # pages of the staging area
    format: KVQuantFormat | None = None

    @classmethod
    def empty(
        cls, clusters: HeadClusters, width: int, *, pages: int, staging: int, size: int, slots: int, most: int,
        dtype: torch.dtype, device: torch.device, rows: KVQuantFormat | None = None,
    ) -> PerHeadCache:  # fmt: skip
        last, held = row_layout(rows, width, dtype)
        shape = ((pages + staging) * clusters.size, size, 1, last)
        count = len(clusters.members)
        return cls(
            allocate_kv_pages(shape, held, device), allocate_kv_pages(shape, held, device),
            torch.zeros(slots + 1, count, most, dtype=torch.int32, device=device),
            torch.zeros(slots + 1, count, dtype=torch.int32, device=device),
            clusters.cluster.to(device), clusters.column.to(device), clusters, range(pages, pages + staging), rows,
        )  # fmt: skip

    @property
    def columns(self) -> int:
        """Heads of a page."""
        return self.clusters.size

    @property
    def size(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[1]

    def layer(self, index: int) -> LayerKVPages:
        cluster, column = self.cluster[index], self.column[index]
        return LayerKVPages(self.keys, self.values, len(cluster), cluster, column, self.columns, self.format)

    def rows(self, slots: Tensor, clusters: Tensor, columns: Tensor, places: Tensor) -> Tensor:
        """Of the cache seen as [rows, width]: where the tokens at these places of their heads lie. All of one shape."""
        blocks = self.tables[slots, clusters, places // self.size].long() * self.columns + columns
        return blocks * self.size + places % self.size

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Whole pages, all of them read before any is written."""
        for cache in (self.keys, self.values):
            pages = cache.view(-1, self.columns, *cache.shape[1:])
            pages[targets] = pages[sources]


def page_bytes(clusters: HeadClusters, row: int, size: int) -> int:
    """What a page takes, keys and values together, where a head's key or value of a token takes `row` bytes."""
    return 2 * clusters.size * size * row
