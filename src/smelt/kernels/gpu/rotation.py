"""Rotary positions in Triton: heads turned by the angle of their token, new keys and values written to their page."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from smelt.kernels.gpu.chip import INDICES
from smelt.kernels.gpu.pages import HeadPages, columns_of, head_pages, key_rows, pointers, strides
from smelt.kernels.gpu.rows import constants, met, width_of, write_row
from smelt.kernels.row_format import RowFormat


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


@triton.jit(do_not_specialize_on_alignment=INDICES)
def rotate_write_kernel(  # type: ignore[no-untyped-def]
    mixed, positions, places, cosines, sines, query_norm, key_norm, queries, key_pages, value_pages, tables, shifts,
    cluster, column, stride, table_stride, cluster_stride, shift_stride, heads, kv_heads, epsilon, width,
    WIDTH: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr, ROW: tl.constexpr, HALF_ROW: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """A head of a token a program. Of `mixed` [tokens, stride] the heads of queries come first, then those of keys,
    then those of values, which are not turned."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    inside = lane < width
    source = mixed + token * stride
    angle, at = tl.load(positions + token), head * width
    if head < heads:
        query = turned(source, at, inside, query_norm, cosines, sines, angle, lane, epsilon, width, HALF, NORM)
        query = met(query, queries.dtype.element_ty, TURNS)
        tl.store(queries + (token * heads + head) * width + lane, query, mask=inside)
        return
    place = tl.load(places + token)
    kept = (head - heads) % kv_heads
    if COLUMNS:  # the place is a slot
        table, shift, block_rows, token_rows, first_row = head_pages(
            tables, shifts, cluster, column, place, kept, table_stride, cluster_stride, shift_stride, kv_heads, SIZE,
            COLUMNS,
        )  # fmt: skip
        row = key_rows(table, angle + shift, place >= 0, block_rows, token_rows, first_row, SIZE)
    else:
        row = place * kv_heads + kept
    if head < heads + kv_heads:
        key = turned(source, at, inside, key_norm, cosines, sines, angle, lane, epsilon, width, HALF, NORM)
        key = met(key, mixed.dtype.element_ty, TURNS)
        write_row(key_pages, row, key, place >= 0, lane, width, FORMAT, ROW, HALF_ROW)
    else:
        value = tl.load(source + at + lane, mask=inside, other=0.0)
        write_row(value_pages, row, value, place >= 0, lane, width, FORMAT, ROW, HALF_ROW)


@dataclass(frozen=True)
class Rotation:
    """The cosines and sines of every position [positions, head size], and the weights of the norms of heads."""

    cosines: Tensor
    sines: Tensor
    norms: tuple[Tensor, Tensor] | None = None  # of queries, of keys
    epsilon: float = 0.0


def rotate_write(
    mixed: Tensor, positions: Tensor, places: Tensor, rotation: Rotation, key_pages: Tensor, value_pages: Tensor,
    heads_own: HeadPages | None = None, rows: RowFormat | None = None,
) -> Tensor:  # fmt: skip
    """Of new tokens [tokens, (heads + 2 * kv heads) * width]: keys and values go to their pages [blocks, size, kv
    heads, width], none for a place of -1. -> queries [tokens, heads, width], turned as the keys of a row format are.
    With `heads_own` a place is a slot."""
    size, kv_heads, last = key_pages.shape[1:]
    width = width_of(rows, last)
    if heads_own is not None:
        kv_heads = len(heads_own.cluster)
    tables = places if heads_own is None else heads_own.tables
    tokens, heads = len(mixed), mixed.shape[1] // width - 2 * kv_heads
    queries = torch.empty(tokens, heads, width, dtype=mixed.dtype, device=mixed.device)
    query_norm, key_norm = rotation.norms or (rotation.cosines, rotation.cosines)
    rotate_write_kernel[(tokens, heads + 2 * kv_heads)](
        mixed, positions, places, rotation.cosines, rotation.sines, query_norm, key_norm, queries, key_pages,
        value_pages, tables, *pointers(heads_own, tables), mixed.stride(0), *strides(heads_own, tables), heads,
        kv_heads, rotation.epsilon, width, WIDTH=triton.next_power_of_2(width), HALF=width // 2,
        NORM=rotation.norms is not None, SIZE=size, COLUMNS=columns_of(heads_own), **constants(rows),
        num_warps=1,
    )  # fmt: skip
    return queries
