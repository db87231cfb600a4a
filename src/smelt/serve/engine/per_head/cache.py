"""Pages of head clusters: one pool for all layers, [page, column, token, head_dim]; every head is a cache of its own.

Tangram (Kim et al., 2026, arXiv 2606.06302): with the column outside the tokens, page * columns + column is a block of
an ordinary paged KV cache with one KV head. The staging pages follow the pool's; they hold a chunk's tokens until it is
compressed.
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
    """Pages and block tables per request and cluster. The last row of tables and shifts is for padding."""

    keys: Tensor  # [pages * columns, size, 1, head_dim], or bytes of quantized rows
    values: Tensor
    tables: Tensor  # [slots + 1, clusters, max pages], int32
    shifts: Tensor  # [slots + 1, clusters], int32: cached tokens of a cluster minus tokens of the text
    cluster: Tensor  # [layers, kv_heads], int64: of each head
    column: Tensor  # [layers, kv_heads], int64
    clusters: HeadClusters
    staging: range  # staging pages
    format: KVQuantFormat | None = None

    @classmethod
    def empty(
        cls, clusters: HeadClusters, width: int, *, pages: int, staging: int, size: int, slots: int, most: int,
        dtype: torch.dtype, device: torch.device, rows: KVQuantFormat | None = None,
    ) -> PerHeadCache:  # fmt: skip
        row_size, row_dtype = row_layout(rows, width, dtype)
        shape = ((pages + staging) * clusters.size, size, 1, row_size)
        num_clusters = len(clusters.members)
        return cls(
            allocate_kv_pages(shape, row_dtype, device), allocate_kv_pages(shape, row_dtype, device),
            torch.zeros(slots + 1, num_clusters, most, dtype=torch.int32, device=device),
            torch.zeros(slots + 1, num_clusters, dtype=torch.int32, device=device),
            clusters.cluster.to(device), clusters.column.to(device), clusters, range(pages, pages + staging), rows,
        )  # fmt: skip

    @property
    def columns(self) -> int:
        """Heads per page."""
        return self.clusters.size

    @property
    def size(self) -> int:
        """Tokens per page."""
        return self.keys.shape[1]

    def layer(self, index: int) -> LayerKVPages:
        cluster, column = self.cluster[index], self.column[index]
        return LayerKVPages(self.keys, self.values, len(cluster), cluster, column, self.columns, self.format)

    def rows(self, slots: Tensor, clusters: Tensor, columns: Tensor, places: Tensor) -> Tensor:
        """Return the rows, in the cache viewed as [rows, head_dim], of cache positions `places`. All have one shape."""
        blocks = self.tables[slots, clusters, places // self.size].long() * self.columns + columns
        return blocks * self.size + places % self.size

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy complete pages; all are read before any is written."""
        for cache in (self.keys, self.values):
            pages = cache.view(-1, self.columns, *cache.shape[1:])
            pages[targets] = pages[sources]


def page_bytes(clusters: HeadClusters, row: int, size: int) -> int:
    """Return the bytes of a page, keys and values, if one head's key or value of a token takes `row` bytes."""
    return 2 * clusters.size * size * row
