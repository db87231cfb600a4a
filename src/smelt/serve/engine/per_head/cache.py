"""Pages of head clusters: one pool for all layers, [page, column, token, head_dim]; every head is a cache of its own.

Tangram (Kim et al., 2026, arXiv 2606.06302): with the column outside the tokens, page * heads_per_page + column is a
block of an ordinary paged KV cache with one KV head. The staging pages follow the pool's; they hold a chunk's tokens
until it is compressed.
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
    """Pages, and block tables per request and cluster. The last slot is for padding."""

    keys: Tensor  # [pages * heads per page, block_size, 1, head_dim], or bytes of quantized rows
    values: Tensor
    block_tables: Tensor  # [slots + 1, clusters, max pages], int32
    seq_len_offsets: Tensor  # [slots + 1, clusters], int32: cached tokens of a cluster minus tokens of the text
    cluster: Tensor  # [layers, kv_heads], int64: of each head
    column: Tensor  # [layers, kv_heads], int64
    clusters: HeadClusters
    staging: range  # staging pages
    kv_quant: KVQuantFormat | None = None

    @classmethod
    def empty(
        cls, clusters: HeadClusters, head_dim: int, *, num_pages: int, num_staging_pages: int, block_size: int,
        max_num_seqs: int, max_pages_per_cluster: int, dtype: torch.dtype, device: torch.device,
        kv_quant: KVQuantFormat | None = None,
    ) -> PerHeadCache:  # fmt: skip
        row_size, row_dtype = row_layout(kv_quant, head_dim, dtype)
        shape = ((num_pages + num_staging_pages) * clusters.size, block_size, 1, row_size)
        num_clusters = len(clusters.members)
        return cls(
            allocate_kv_pages(shape, row_dtype, device), allocate_kv_pages(shape, row_dtype, device),
            torch.zeros(
                max_num_seqs + 1, num_clusters, max_pages_per_cluster, dtype=torch.int32, device=device
            ),
            torch.zeros(max_num_seqs + 1, num_clusters, dtype=torch.int32, device=device),
            clusters.cluster.to(device), clusters.column.to(device), clusters,
            range(num_pages, num_pages + num_staging_pages), kv_quant,
        )  # fmt: skip

    @property
    def heads_per_page(self) -> int:
        """Heads per page."""
        return self.clusters.size

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.keys.shape[1]

    def layer(self, index: int) -> LayerKVPages:
        cluster, column = self.cluster[index], self.column[index]
        return LayerKVPages(self.keys, self.values, len(cluster), cluster, column, self.heads_per_page, self.kv_quant)

    def rows(self, slots: Tensor, clusters: Tensor, columns: Tensor, positions: Tensor) -> Tensor:
        """Return the rows of cache positions in the cache viewed as [rows, head_dim]. All arguments have one shape."""
        blocks = self.block_tables[slots, clusters, positions // self.block_size].long() * self.heads_per_page + columns
        return blocks * self.block_size + positions % self.block_size

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy complete pages; all are read before any is written."""
        for cache in (self.keys, self.values):
            pages = cache.view(-1, self.heads_per_page, *cache.shape[1:])
            pages[targets] = pages[sources]


def page_bytes(clusters: HeadClusters, row_bytes: int, block_size: int) -> int:
    """Return the KV cache bytes of one page; the key or the value of one token in one head takes `row_bytes`."""
    return 2 * clusters.size * block_size * row_bytes
