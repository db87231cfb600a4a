"""Rotary positions in Triton: heads turned by the angle of their token, new keys and values written to their page."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from smelt.kernels.gpu.arch import UNALIGNED_ARGS
from smelt.kernels.gpu.pages import ClusteredHeadPages, columns_of, head_pages, key_rows, pointers, strides
from smelt.kernels.gpu.rows import NUMBERS, constants, met, width_of, write_row
from smelt.kernels.kv_quant import KVQuantFormat

MANY_TOKENS = 256  # tokens from which there are more programs than run at once, so that each takes several heads
HEADS_PER_PROGRAM = 8  # heads, a power of two


@triton.jit
def turned(  # type: ignore[no-untyped-def]
    source, place, inside, norm, cosines, sines, angle, lane, epsilon, width, HALF: tl.constexpr, NORM: tl.constexpr
):
    """Heads at source + place [..., WIDTH], normed if asked and turned by the angle of a position, in float32. The
    other half of a head is read beside it."""
    partner = tl.where(lane < HALF, lane + HALF, lane - HALF)
    own = tl.load(source + place + lane, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + place + partner, mask=inside, other=0.0).to(tl.float32)
    known = lane < width
    if NORM:
        over = tl.rsqrt(tl.sum(own * own, axis=-1, keep_dims=True) / width + epsilon)
        own = own * over * tl.load(norm + lane, mask=known, other=0.0).to(tl.float32)
        other = other * over * tl.load(norm + partner, mask=known, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + angle * width + lane, mask=known, other=0.0)
    sine = tl.load(sines + angle * width + lane, mask=known, other=0.0)
    return own * cosine + tl.where(lane < HALF, -other, other) * sine


@triton.jit
def write_heads(  # type: ignore[no-untyped-def]
    pages, rows, x, written, lane, width, WIDTH: tl.constexpr, FORMAT: tl.constexpr, ROW: tl.constexpr,
    HALF_ROW: tl.constexpr,
):  # fmt: skip
    """Heads [count, WIDTH] into their rows [count]; of rows that are packed there is one."""
    if FORMAT == NUMBERS:
        tl.store(pages + rows[:, None] * width + lane, x, mask=written[:, None] & (lane < width))
    else:
        row, one = tl.sum(rows, axis=0), tl.reshape(x, [WIDTH])
        there = tl.sum(written.to(tl.int32), axis=0) > 0
        write_row(pages, row, one, there, tl.arange(0, WIDTH), width, FORMAT, ROW, HALF_ROW)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGS)
def rotate_write_kernel(  # type: ignore[no-untyped-def]
    mixed, positions, places, cosines, sines, query_norm, key_norm, queries, key_pages, value_pages, tables, shifts,
    cluster, column, stride, table_stride, cluster_stride, shift_stride, heads, kv_heads, epsilon, width,
    WIDTH: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr, ROW: tl.constexpr, HALF_ROW: tl.constexpr, TURNS: tl.constexpr, TOGETHER: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Some heads of a token a program: TOGETHER of queries, or KEPT of keys or of values. Of `mixed` [tokens, stride]
    the heads of queries come first, then those of keys, then those of values, which are not turned."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, WIDTH)[None, :]
    source = mixed + token * stride
    angle = tl.load(positions + token)
    groups, kept_groups = tl.cdiv(heads, TOGETHER), tl.cdiv(kv_heads, KEPT)
    if part < groups:
        head = (part * TOGETHER + tl.arange(0, TOGETHER))[:, None]
        inside = (head < heads) & (lane < width)
        at = head * width
        query = turned(source, at, inside, query_norm, cosines, sines, angle, lane, epsilon, width, HALF, NORM)
        query = met(query, queries.dtype.element_ty, TURNS)
        tl.store(queries + (token * heads + head) * width + lane, query, mask=inside)
        return
    place = tl.load(places + token)
    kept = (part - groups) % kept_groups * KEPT + tl.arange(0, KEPT)
    there = kept < kv_heads
    if COLUMNS:  # the place is a slot
        table, shift, block_rows, token_rows, first_row = head_pages(
            tables, shifts, cluster, column, place, tl.where(there, kept, 0), table_stride, cluster_stride,
            shift_stride, kv_heads, SIZE, COLUMNS,
        )  # fmt: skip
        rows = key_rows(table, angle + shift, place >= 0, block_rows, token_rows, first_row, SIZE)
    else:
        rows = place * kv_heads + kept
    inside = there[:, None] & (lane < width)
    written = there & (place >= 0)
    if part < groups + kept_groups:
        at = (heads + kept)[:, None] * width
        key = turned(source, at, inside, key_norm, cosines, sines, angle, lane, epsilon, width, HALF, NORM)
        key = met(key, mixed.dtype.element_ty, TURNS)
        write_heads(key_pages, rows, key, written, lane, width, WIDTH, FORMAT, ROW, HALF_ROW)
    else:
        at = (heads + kv_heads + kept)[:, None] * width
        value = tl.load(source + at + lane, mask=inside, other=0.0)
        write_heads(value_pages, rows, value, written, lane, width, WIDTH, FORMAT, ROW, HALF_ROW)


@dataclass(frozen=True)
class RotaryParams:
    """The cosines and sines of every position [positions, head size], and the weights of the norms of heads."""

    cos: Tensor
    sin: Tensor
    qk_norms: tuple[Tensor, Tensor] | None = None  # of queries, of keys
    eps: float = 0.0


def rope_and_store_kv(
    qkv: Tensor, positions: Tensor, slot_mapping: Tensor, rotary: RotaryParams, key_pages: Tensor, value_pages: Tensor,
    head_pages: ClusteredHeadPages | None = None, kv_quant: KVQuantFormat | None = None,
) -> Tensor:  # fmt: skip
    """Of new tokens [tokens, (heads + 2 * kv heads) * width]: keys and values go to their pages [blocks, size, kv
    heads, width], none for a place of -1. -> queries [tokens, heads, width], turned as the keys of a row format are.
    With `heads_own` a place is a slot."""
    size, kv_heads, last = key_pages.shape[1:]
    width = width_of(kv_quant, last)
    if head_pages is not None:
        kv_heads = len(head_pages.head_cluster)
    tables = slot_mapping if head_pages is None else head_pages.block_tables
    tokens, heads = len(qkv), qkv.shape[1] // width - 2 * kv_heads
    queries = torch.empty(tokens, heads, width, dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm = rotary.qk_norms or (rotary.cos, rotary.cos)
    together = HEADS_PER_PROGRAM if tokens >= MANY_TOKENS else 1
    kept = together if kv_quant is None else 1
    rotate_write_kernel[(tokens, triton.cdiv(heads, together) + 2 * triton.cdiv(kv_heads, kept))](
        qkv, positions, slot_mapping, rotary.cos, rotary.sin, query_norm, key_norm, queries, key_pages,
        value_pages, tables, *pointers(head_pages, tables), qkv.stride(0), *strides(head_pages, tables), heads,
        kv_heads, rotary.eps, width, WIDTH=triton.next_power_of_2(width), HALF=width // 2,
        NORM=rotary.qk_norms is not None, SIZE=size, COLUMNS=columns_of(head_pages), **constants(kv_quant),
        TOGETHER=together, KEPT=kept, num_warps=1,
    )  # fmt: skip
    return queries
