"""Where keys and values lie, for kernels: in pages of all heads of a layer, or in those of clusters of heads.

Pages of a layer are [block, token, head, width]; those of clusters, which may have heads of several layers, are [block,
column, token, width], and every cluster of a request has its own blocks and its own length.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def head_pages(  # type: ignore[no-untyped-def]
    tables, shifts, cluster, column, slot, head, table_stride, cluster_stride, shift_stride, kv_heads,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of one head of a request: its row of the tables; how many tokens it holds less than the text has; and where its
    keys lie in the pages seen as rows of `width`: rows of a block, rows of a token, its first row."""
    table = tables + slot * table_stride
    shift, block_rows, token_rows, first_row = 0, SIZE * kv_heads, kv_heads, head
    if COLUMNS:
        own = tl.load(cluster + head)
        table += own * cluster_stride
        shift = tl.load(shifts + slot * shift_stride + own)
        block_rows, token_rows, first_row = COLUMNS * SIZE, 1, tl.load(column + head).to(tl.int32) * SIZE
    return table, shift, block_rows, token_rows, first_row


@triton.jit
def key_rows(table, positions, there, block_rows, token_rows, first_row, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the keys at these places of a head lie. Pages have fewer than 2^31 rows, so that only addresses, which are
    made of these numbers, need 64 bits; and places are not negative, so that dividing them is a shift."""
    places = positions.to(tl.uint32)
    blocks = tl.load(table + places // SIZE, mask=there, other=0)
    return (blocks * block_rows + (places % SIZE).to(tl.int32) * token_rows + first_row).to(tl.int64)


@dataclass(frozen=True)
class ClusteredHeadPages:
    """Whose pages are whose in a layer, where clusters of heads have pages of their own."""

    block_tables: Tensor  # [slots, clusters, most blocks], int32
    seq_len_offsets: Tensor  # [slots, clusters], int32: tokens that a cluster holds, less those of the text
    head_cluster: Tensor  # [kv heads], int64
    head_column: Tensor  # [kv heads], int64
    heads_per_page: int  # heads of a page
    split_work: Tensor | None = None  # [programs, 3], int32: head, part of its keys, parts of that head; to decode


def columns_of(pages: ClusteredHeadPages | None) -> int:
    """0: pages of a layer."""
    return 0 if pages is None else pages.heads_per_page


def pointers(pages: ClusteredHeadPages | None, tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shifts, clusters and columns; something that is not read where there are none."""
    return (tables, tables, tables) if pages is None else (pages.seq_len_offsets, pages.head_cluster, pages.head_column)


def strides(pages: ClusteredHeadPages | None, tables: Tensor) -> tuple[int, int, int]:
    """Of a slot in the tables, of a cluster in there, of a slot in the shifts."""
    return (
        (tables.stride(0), 0, 0)
        if pages is None
        else (tables.stride(0), tables.stride(1), pages.seq_len_offsets.stride(0))
    )
