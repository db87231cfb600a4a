"""Addressing of KV pages in kernels: pages with all heads of a layer, or pages of clusters of heads.

Pages of a layer are [block, token, head, head_dim]; those of clusters, which may have heads of several layers, are
[block, column, token, head_dim], and every cluster of a request has its own blocks and its own length.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def head_pages(  # type: ignore[no-untyped-def]
    block_tables, seq_len_offsets, head_cluster, head_column, slot, head, table_stride, cluster_stride, offset_stride,
    kv_heads, BLOCK_SIZE: tl.constexpr, HEADS_PER_PAGE: tl.constexpr,
):  # fmt: skip
    """Return, for one head of a request, its row of block_tables, its seq_len offset, and where its keys lie in pages
    viewed as rows of `head_dim`: rows per block, rows per token, first row."""
    table = block_tables + slot * table_stride
    seq_len_offset, block_rows, token_rows, first_row = 0, BLOCK_SIZE * kv_heads, kv_heads, head
    if HEADS_PER_PAGE:
        cluster_id = tl.load(head_cluster + head)
        table += cluster_id * cluster_stride
        seq_len_offset = tl.load(seq_len_offsets + slot * offset_stride + cluster_id)
        block_rows, token_rows, first_row = (
            HEADS_PER_PAGE * BLOCK_SIZE,
            1,
            tl.load(head_column + head).to(tl.int32) * BLOCK_SIZE,
        )
    return table, seq_len_offset, block_rows, token_rows, first_row


@triton.jit
def key_rows(table, positions, in_range, block_rows, token_rows, first_row, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows of the keys at these positions. Pages have fewer than 2^31 rows, so that only addresses need 64
    bits; positions are unsigned, so that divisions are shifts."""
    positions_u32 = positions.to(tl.uint32)
    blocks = tl.load(table + positions_u32 // BLOCK_SIZE, mask=in_range, other=0)
    return (blocks * block_rows + (positions_u32 % BLOCK_SIZE).to(tl.int32) * token_rows + first_row).to(tl.int64)


@dataclass(frozen=True)
class ClusteredHeadPages:
    """Pages of a layer whose heads belong to clusters with their own pages."""

    block_tables: Tensor  # [slots, clusters, max blocks], int32
    seq_len_offsets: Tensor  # [slots, clusters], int32: tokens a cluster keeps minus tokens of the sequence
    head_cluster: Tensor  # [kv heads], int64
    head_column: Tensor  # [kv heads], int64
    heads_per_page: int
    split_work: Tensor | None = None  # [programs, 3], int32: head, split, number of splits of that head; for decode


def heads_per_page_of(pages: ClusteredHeadPages | None) -> int:
    """Return heads per page; 0 for pages of a layer."""
    return 0 if pages is None else pages.heads_per_page


def pointers(pages: ClusteredHeadPages | None, block_tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets, clusters and columns; placeholders if there are none."""
    return (
        (block_tables, block_tables, block_tables)
        if pages is None
        else (pages.seq_len_offsets, pages.head_cluster, pages.head_column)
    )


def strides(pages: ClusteredHeadPages | None, block_tables: Tensor) -> tuple[int, int, int]:
    """Return the strides of slots and clusters in block_tables, and of slots in the offsets."""
    return (
        (block_tables.stride(0), 0, 0)
        if pages is None
        else (block_tables.stride(0), block_tables.stride(1), pages.seq_len_offsets.stride(0))
    )
