"""Attention over a paged KV cache in Triton: decode with split keys, and prefill.

Query heads that share a KV head are computed together, so that keys are read once. `smelt.kernels.paged` has the
reference. Pages hold all heads of a layer, [block, token, head, head_dim], or those of a cluster of heads, possibly of
several layers, [block, column, token, head_dim]; then every head has its own length. With a `KVQuantFormat` they hold
quantized rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.gpu.arch import PDL, UNALIGNED_ARGS, num_sms
from smelt.kernels.gpu.pages import ClusteredHeadPages, head_pages, heads_per_page_of, key_rows, pointers, strides
from smelt.kernels.gpu.rope import RotaryParams, apply_rope
from smelt.kernels.gpu.rows import (
    deinterleave,
    hadamard_if,
    head_dim_of,
    interleave,
    kernel_constants,
    load_kv_rows,
    padded_head_dim,
    scale_lift,
    store_kv_row,
)
from smelt.kernels.kv_quant import KVQuantFormat

LOG2_E = 1.4426950408889634
LOG2E = tl.constexpr(LOG2_E)  # for kernels
BLOCK_N = 64  # keys per tile when decoding
PREFILL_TILES = 64, 64, 4, 2  # queries and keys per tile, warps, stages
LONG_TILES = 128, 128, 8, 2  # long prompts with long contexts
LONG_NARROW_TILES = 128, 64, 8, 3  # the same with head_dim up to 64
LONG_CODE_TILES = 128, 64, 8, 2  # the same with a quantized KV cache, which needs registers to dequantize
WAVES = 2  # most programs per multiprocessor when keys are split


@triton.jit
def load_kv_tile(  # type: ignore[no-untyped-def]
    key_pages, value_pages, table, start, end, block_rows, token_rows, first_row, lane, head_dim, DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr,
    HALF_DIM: tl.constexpr, UNMASKED: tl.constexpr = False,
):  # fmt: skip
    """Load keys and values of the positions from `start` on [BLOCK_N, HEAD_DIM], the mask of those before `end`
    (UNMASKED: all), and their scales."""
    positions = start + tl.arange(0, BLOCK_N)
    in_range = tl.full([BLOCK_N], True, tl.int1) if UNMASKED else positions < end
    rows = key_rows(table, positions, in_range, block_rows, token_rows, first_row, BLOCK_SIZE)
    keys, key_scales = load_kv_rows(key_pages, rows, in_range, lane, head_dim, DTYPE, FORMAT, ROW_BYTES, HALF_DIM)
    values, value_scales = load_kv_rows(value_pages, rows, in_range, lane, head_dim, DTYPE, FORMAT, ROW_BYTES, HALF_DIM)
    return keys, values, in_range, key_scales, value_scales


@triton.jit
def softmax_update(  # type: ignore[no-untyped-def]
    scores, scale, visible, values, key_scales, value_scales, m_i, l_i, acc, FORMAT: tl.constexpr,
    UNMASKED: tl.constexpr = False,
):  # fmt: skip
    """Update the online softmax with one tile of keys. Times `scale`, scores are exponents of two."""
    if FORMAT:
        scores = scores * key_scales[None, :]
    if not UNMASKED:
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=1) * scale)
    base = m_new if UNMASKED else tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores * scale - base[:, None])
    alpha = tl.exp2(m_i - base)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    if FORMAT:
        p = p * (value_scales * scale_lift(FORMAT))[None, :]
    acc = acc * alpha[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def attend_tile(  # type: ignore[no-untyped-def]
    query, key_pages, value_pages, table, start, end, block_rows, token_rows, first_row, lane, head_dim, scale, m_i,
    l_i, acc, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr,
    HALF_DIM: tl.constexpr, UNMASKED: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of keys from `start` on; every query sees those before `end` (UNMASKED: all)."""
    keys, values, in_range, key_scales, value_scales = load_kv_tile(
        key_pages, value_pages, table, start, end, block_rows, token_rows, first_row, lane, head_dim, query.dtype,
        BLOCK_SIZE, BLOCK_N, FORMAT, ROW_BYTES, HALF_DIM, UNMASKED,
    )  # fmt: skip
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    return softmax_update(
        scores, scale, in_range[None, :], values, key_scales, value_scales, m_i, l_i, acc, FORMAT, UNMASKED
    )


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGS)
def decode_kernel(  # type: ignore[no-untyped-def]
    qkv, cos, sin, query_norm, key_norm, sinks, key_pages, value_pages, block_tables, seq_len_offsets, head_cluster,
    head_column, split_work, slots, seq_lens, output, partial_acc, softmax_stats, split_counter, scale, window, epsilon,
    stride, table_stride, cluster_stride, offset_stride, kv_heads, head_dim, BLOCK_SIZE: tl.constexpr,
    Q_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, HEADS_PER_PAGE: tl.constexpr, FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr, HALF_DIM: tl.constexpr, HADAMARD_STEPS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Decode one new token per request. A program handles one KV head and one split of its length; there are SPLITS of
    them, or where heads differ as many as `split_work` says. The first split also stores the key and value of the new
    token; the split that finishes last merges all of them."""
    request = tl.program_id(0).to(tl.int64)
    if HEADS_PER_PAGE:
        item = split_work + tl.program_id(1) * 3
        head, split, head_splits = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    else:
        head, split, head_splits = tl.program_id(1), tl.program_id(2), SPLITS
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    row, lane = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    in_head = lane < head_dim
    valid = (row < Q_PER_KV)[:, None] & in_head[None, :]
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    table, seq_len_offset, block_rows, token_rows, first_row = head_pages(
        block_tables, seq_len_offsets, head_cluster, head_column, tl.load(slots + request), head, table_stride,
        cluster_stride, offset_stride, kv_heads, BLOCK_SIZE, HEADS_PER_PAGE,
    )  # fmt: skip
    kv_len = tl.where(seq_len > 0, seq_len + seq_len_offset, 0)
    low = tl.maximum(kv_len - window, 0)
    split_len = tl.cdiv(tl.cdiv(kv_len - 1 - low, head_splits), BLOCK_N) * BLOCK_N
    begin = low + split * split_len
    end = tl.minimum(begin + split_len, kv_len - 1)
    if SPLITS > 1:  # few keys per program: the first ones, stored by earlier steps, need not wait
        first_keys, first_values, first_in_range, first_key_scales, first_value_scales = load_kv_tile(
            key_pages, value_pages, table, begin, end, block_rows, token_rows, first_row, lane, head_dim, DTYPE,
            BLOCK_SIZE, BLOCK_N, FORMAT, ROW_BYTES, HALF_DIM,
        )  # fmt: skip
    if PDL:  # outputs of earlier kernels are read from here on
        gdc_wait()
        gdc_launch_dependents()
    angle = tl.maximum(seq_len - 1, 0)
    source = qkv + request * stride
    query_offset = (head * Q_PER_KV + row)[:, None] * head_dim
    query = apply_rope(
        source, query_offset, valid, query_norm, cos, sin, angle, lane[None, :], epsilon, head_dim, HALF, NORM,
        INTERLEAVED,
    )  # fmt: skip
    query = hadamard_if(query, DTYPE, HADAMARD_STEPS)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    if (split == 0) & (kv_len > 0):
        key_offset = (kv_heads * Q_PER_KV + head) * head_dim
        key = apply_rope(
            source, key_offset, in_head, key_norm, cos, sin, angle, lane, epsilon, head_dim, HALF, NORM, INTERLEAVED
        )
        value = tl.load(source + key_offset + kv_heads * head_dim + lane, mask=in_head, other=0.0)
        new_row = key_rows(table, kv_len - 1, kv_len > 0, block_rows, token_rows, first_row, BLOCK_SIZE)
        key, value = hadamard_if(key, DTYPE, HADAMARD_STEPS), hadamard_if(value, DTYPE, HADAMARD_STEPS)
        key = store_kv_row(key_pages, new_row, key, kv_len > 0, lane, head_dim, FORMAT, ROW_BYTES, HALF_DIM)
        value = store_kv_row(value_pages, new_row, value, kv_len > 0, lane, head_dim, FORMAT, ROW_BYTES, HALF_DIM)
        m_i = tl.sum(query.to(tl.float32) * key[None, :], axis=1) * scale
        l_i = tl.full([BLOCK_M], 1.0, tl.float32)
        acc = acc + interleave(value[None, :] * scale_lift(FORMAT), FORMAT, HALF_DIM)
        if sinks is not None:  # a key without a value
            sink = tl.load(sinks + head * Q_PER_KV + row, mask=row < Q_PER_KV, other=0.0) * LOG2E
            m_new = tl.maximum(m_i, sink)
            l_i = tl.exp2(m_i - m_new)
            acc = acc * l_i[:, None]
            l_i += tl.exp2(sink - m_new)
            m_i = m_new
    query = interleave(query, FORMAT, HALF_DIM)
    if SPLITS > 1:
        scores = tl.dot(query, tl.trans(first_keys), input_precision="ieee")
        m_i, l_i, acc = softmax_update(
            scores, scale, first_in_range[None, :], first_values, first_key_scales, first_value_scales, m_i, l_i,
            acc, FORMAT,
        )  # fmt: skip
        begin += BLOCK_N
    full_end = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N  # end of the last full tile
    for start in range(begin, full_end, BLOCK_N):
        m_i, l_i, acc = attend_tile(
            query, key_pages, value_pages, table, start, end, block_rows, token_rows, first_row, lane, head_dim, scale,
            m_i, l_i, acc, BLOCK_SIZE, BLOCK_N, FORMAT, ROW_BYTES, HALF_DIM, True,
        )  # fmt: skip
    if full_end < end:
        m_i, l_i, acc = attend_tile(
            query, key_pages, value_pages, table, full_end, end, block_rows, token_rows, first_row, lane, head_dim,
            scale, m_i, l_i, acc, BLOCK_SIZE, BLOCK_N, FORMAT, ROW_BYTES, HALF_DIM, False,
        )  # fmt: skip
    if FORMAT:
        acc = deinterleave(acc * (1.0 / scale_lift(FORMAT)), FORMAT, HALF_DIM)
        acc = hadamard_if(acc, tl.float32, HADAMARD_STEPS)  # back: H is symmetric
    heads = kv_heads * Q_PER_KV
    if SPLITS == 1:
        acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        output_ptr = output + request * heads * head_dim + query_offset + lane[None, :]
        tl.store(output_ptr, acc.to(output.dtype.element_ty), mask=valid)
    else:
        stat_index = (request * heads + head * Q_PER_KV + row) * SPLITS + split
        tl.store(partial_acc + stat_index[:, None] * head_dim + lane[None, :], acc, mask=valid)
        tl.store(softmax_stats + stat_index * 2, m_i, mask=row < Q_PER_KV)
        tl.store(softmax_stats + stat_index * 2 + 1, l_i, mask=row < Q_PER_KV)
        tl.debug_barrier()  # all threads have stored
        finished = tl.atomic_add(split_counter + request * kv_heads + head, 1, sem="acq_rel")
        if finished == head_splits - 1:
            tl.store(split_counter + request * kv_heads + head, 0)
            for member in tl.static_range(Q_PER_KV):
                member_row = request * heads + head * Q_PER_KV + member
                merge_splits(partial_acc, softmax_stats, output, member_row, head_splits, head_dim, SPLITS, HEAD_DIM)


@triton.jit
def merge_splits(  # type: ignore[no-untyped-def]
    partial_acc, softmax_stats, output, row, head_splits, head_dim, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Merge the splits of one head of one request."""
    split, lane = tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    in_range = split < head_splits
    stats_ptr = softmax_stats + (row * SPLITS + split) * 2
    m_i = tl.load(stats_ptr, mask=in_range, other=float("-inf"), cache_modifier=".cg")
    l_i = tl.load(stats_ptr + 1, mask=in_range, other=0.0, cache_modifier=".cg")
    m_max = tl.max(m_i, axis=0)
    alpha = tl.exp2(m_i - tl.where(m_max == float("-inf"), 0.0, m_max))
    inside = (lane < head_dim)[None, :] & (l_i > 0)[:, None]
    partial_ptr = partial_acc + (row * SPLITS + split)[:, None] * head_dim + lane[None, :]
    acc = tl.load(partial_ptr, mask=inside, other=0.0, cache_modifier=".cg")
    l_total = tl.sum(l_i * alpha, axis=0)
    merged = tl.sum(acc * alpha[:, None], axis=0) / tl.where(l_total == 0.0, 1.0, l_total)
    tl.store(output + row * head_dim + lane, merged.to(output.dtype.element_ty), mask=lane < head_dim)


@triton.jit
def attend_range(  # type: ignore[no-untyped-def]
    query, position, key_pages, value_pages, table, begin, end, block_rows, token_rows, first_row, lane, head_dim,
    scale, window, m_i, l_i, acc, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr, HALF_DIM: tl.constexpr, UNMASKED: tl.constexpr,
):  # fmt: skip
    """Update the softmax of a tile of queries with the keys from `begin` to `end`; UNMASKED: all are visible."""
    for start in range(begin, end, BLOCK_N):
        keys, values, in_range, key_scales, value_scales = load_kv_tile(
            key_pages, value_pages, table, start, end, block_rows, token_rows, first_row, lane, head_dim, query.dtype,
            BLOCK_SIZE, BLOCK_N, FORMAT, ROW_BYTES, HALF_DIM, UNMASKED,
        )  # fmt: skip
        key_positions = start + tl.arange(0, BLOCK_N)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        visible = (key_positions[None, :] <= position[:, None]) & (key_positions[None, :] > position[:, None] - window)
        m_i, l_i, acc = softmax_update(
            scores,
            scale,
            visible & in_range[None, :],
            values,
            key_scales,
            value_scales,
            m_i,
            l_i,
            acc,
            FORMAT,
            UNMASKED,
        )
    return m_i, l_i, acc


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGS)
def prefill_kernel(  # type: ignore[no-untyped-def]
    queries, sinks, key_pages, value_pages, block_tables, seq_len_offsets, head_cluster, head_column, slots, seq_lens,
    cu_seqlens_q, tile_request, tile_first, output, scale, window, query_stride, table_stride, cluster_stride,
    offset_stride, kv_heads, head_dim, group, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, HEADS_PER_PAGE: tl.constexpr, WINDOWED: tl.constexpr, FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr, HALF_DIM: tl.constexpr, HADAMARD_STEPS: tl.constexpr,
):  # fmt: skip
    """Prefill a tile of BLOCK_M query tokens of one request and one query head. Most keys are visible to all of them;
    only those at the ends are masked by position."""
    tile, query_head = tl.program_id(0), tl.program_id(1)
    request, first = tl.load(tile_request + tile), tl.load(tile_first + tile)
    start, stop = tl.load(cu_seqlens_q + request).to(tl.int32), tl.load(cu_seqlens_q + request + 1).to(tl.int32)
    head = query_head // group
    slot = tl.load(slots + request) if HEADS_PER_PAGE else request.to(tl.int64)
    table, seq_len_offset, block_rows, token_rows, first_row = head_pages(
        block_tables,
        seq_len_offsets,
        head_cluster,
        head_column,
        slot,
        head,
        table_stride,
        cluster_stride,
        offset_stride,
        kv_heads,
        BLOCK_SIZE,
        HEADS_PER_PAGE,
    )
    kv_len = tl.load(seq_lens + request).to(tl.int32) + seq_len_offset
    row, lane = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    token = start + first + row
    valid = (token < stop)[:, None] & (lane < head_dim)[None, :]
    lowest = kv_len - (stop - start) + first  # position of the first query
    position = lowest + row
    head_offset = query_head * head_dim + lane[None, :]
    query = tl.load(queries + token.to(tl.int64)[:, None] * query_stride + head_offset, mask=valid, other=0.0)
    query = interleave(query, FORMAT, HALF_DIM)
    if sinks is not None:  # a key without a value, which every query sees
        m_i = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + query_head) * LOG2E
        l_i = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(lowest + BLOCK_M, kv_len)
    unmasked_end = (lowest + 1) // BLOCK_N * BLOCK_N  # keys below are visible to every query, window aside
    if WINDOWED:
        inside = tl.cdiv(tl.maximum(lowest + BLOCK_M - window, 0), BLOCK_N) * BLOCK_N  # keys above are in every window
        inside = tl.minimum(tl.maximum(inside, begin), tl.maximum(unmasked_end, begin))
        m_i, l_i, acc = attend_range(
            query, position, key_pages, value_pages, table, begin, inside, block_rows, token_rows, first_row, lane,
            head_dim, scale, window, m_i, l_i, acc, BLOCK_SIZE, BLOCK_N, FORMAT, ROW_BYTES, HALF_DIM, False,
        )  # fmt: skip
        begin = inside
    m_i, l_i, acc = attend_range(
        query, position, key_pages, value_pages, table, begin, unmasked_end, block_rows, token_rows, first_row, lane,
        head_dim, scale, window, m_i, l_i, acc, BLOCK_SIZE, BLOCK_N, FORMAT, ROW_BYTES, HALF_DIM, True,
    )  # fmt: skip
    m_i, l_i, acc = attend_range(
        query, position, key_pages, value_pages, table, tl.maximum(begin, unmasked_end), end, block_rows, token_rows,
        first_row, lane, head_dim, scale, window, m_i, l_i, acc, BLOCK_SIZE, BLOCK_N, FORMAT, ROW_BYTES, HALF_DIM,
        False,
    )  # fmt: skip
    acc = deinterleave(acc, FORMAT, HALF_DIM) / tl.where(l_i == 0.0, 1.0, l_i * scale_lift(FORMAT))[:, None]
    acc = hadamard_if(acc, tl.float32, HADAMARD_STEPS)  # back: H is symmetric
    heads = kv_heads * group
    output_offset = token.to(tl.int64)[:, None] * heads * head_dim + head_offset
    tl.store(output + output_offset, acc.to(output.dtype.element_ty), mask=valid)


NO_WINDOW = 2**30


def num_splits(requests: int, kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """Return the number of splits of the keys, a power of two: enough to occupy the GPU, at least two tiles each."""
    max_splits = min(WAVES * num_sms // max(requests * kv_heads, 1), max_seq_len // (2 * BLOCK_N))
    return 1 << max(max_splits, 1).bit_length() - 1


def decode_config(programs: int, splits: int, max_seq_len: int, num_sms: int) -> tuple[int, int, int]:
    """Return keys per tile, warps and stages: small programs if there are many of them, larger ones if few, and more so
    if each has many keys."""
    if splits == 1 or programs > 3 * num_sms:
        return BLOCK_N, 2, 3
    return (2 * BLOCK_N, 4, 2) if max_seq_len // splits >= 8 * BLOCK_N else (BLOCK_N, 4, 3)


def prefill_config(
    metadata: AttentionMetadata, head_dim: int, kv_quant: KVQuantFormat | None = None
) -> tuple[int, int, int, int]:
    if metadata.max_seq_len < 2048 or max(metadata.query_lens) < 512:
        return PREFILL_TILES
    if kv_quant is not None:
        return LONG_CODE_TILES
    return LONG_NARROW_TILES if head_dim <= 64 else LONG_TILES


@dataclass(frozen=True)
class DecodeMetadata:
    """Where the one new token of each request goes. A length of 0 marks padding of the batch."""

    slots: Tensor  # [requests], int64: row of block_tables
    seq_lens: Tensor  # [requests], int64: tokens of the sequence, the new one included
    block_tables: Tensor  # [slots, max blocks], int32, or [slots, clusters, max blocks]
    split_counters: Tensor  # [at least requests * kv heads], int32: zero before and after every call
    max_seq_len: int  # an upper bound of seq_lens


def paged_decode(
    qkv: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: DecodeMetadata, rotary: RotaryParams, scale: float,
    window: int | None = None, *, head_pages: ClusteredHeadPages | None = None, splits: int | None = None,
    config: tuple[int, int, int] | None = None, kv_quant: KVQuantFormat | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Apply RoPE to `qkv` [requests, (heads + 2 * kv heads) * head_dim], store keys and values, and attend.

    `config`: keys per tile, warps, stages. `sinks` [heads], float32: a score of each head that has no value. With
    `head_pages` the cache is [blocks * heads_per_page, block_size, 1, head_dim], and `splits` the largest number of
    splits in its work. Returns [requests, heads * head_dim].
    """
    requests = len(qkv)
    _, size, kv_heads, last = key_pages.shape
    head_dim = head_dim_of(kv_quant, last)
    if head_pages is not None:
        kv_heads = len(head_pages.head_cluster)
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    group, padded = heads // kv_heads, max(padded_head_dim(kv_quant, head_dim), 16)
    sms, batch = num_sms(qkv.device), triton.next_power_of_2(requests)  # limits the number of compiled kernels
    if splits is None:
        splits = num_splits(batch, kv_heads, metadata.max_seq_len, sms)
    split_work = metadata.slots if head_pages is None or head_pages.split_work is None else head_pages.split_work
    grid = (requests, kv_heads, splits) if head_pages is None else (requests, len(split_work), 1)
    tile_keys, warps, stages = config or decode_config(batch * math.prod(grid[1:]), splits, metadata.max_seq_len, sms)
    output = torch.empty(requests, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    partial_acc = softmax_stats = output
    if splits > 1:
        partial_acc = torch.empty(requests, heads, splits, head_dim, dtype=torch.float32, device=qkv.device)
        softmax_stats = torch.empty(requests, heads, splits, 2, dtype=torch.float32, device=qkv.device)
    query_norm, key_norm = rotary.qk_norms or (rotary.cos, rotary.cos)
    decode_kernel[grid](
        qkv, rotary.cos, rotary.sin, query_norm, key_norm, sinks, key_pages, value_pages, metadata.block_tables,
        *pointers(head_pages, metadata.block_tables), split_work, metadata.slots, metadata.seq_lens, output,
        partial_acc, softmax_stats, metadata.split_counters, scale * LOG2_E, window or NO_WINDOW, rotary.eps,
        qkv.stride(0), *strides(head_pages, metadata.block_tables), kv_heads, head_dim, BLOCK_SIZE=size, Q_PER_KV=group,
        BLOCK_M=max(triton.next_power_of_2(group), 16), HEAD_DIM=padded, HALF=rotary.half, BLOCK_N=tile_keys,
        SPLITS=splits, NORM=rotary.qk_norms is not None, PDL=PDL, HEADS_PER_PAGE=heads_per_page_of(head_pages),
        **kernel_constants(kv_quant), INTERLEAVED=rotary.interleaved, num_warps=warps, num_stages=stages,
        launch_pdl=PDL,
    )  # fmt: skip
    return output


def paged_prefill(
    queries: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: AttentionMetadata, scale: float,
    window: int | None = None, *, tiles: QueryTiles | None = None, head_pages: ClusteredHeadPages | None = None,
    slots: Tensor | None = None, kv_quant: KVQuantFormat | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend with many query tokens per request: [tokens, heads, head_dim] -> the same shape.

    `tiles` can be computed once for all layers. With `head_pages` the block tables are those of all slots, and `slots`
    [requests] is the row of each request. Queries are already rotated if the KV format is; the
    output is not. `sinks` as for `paged_decode`."""
    tokens, heads, head_dim = queries.shape
    _, size, kv_heads, _ = key_pages.shape
    if head_pages is not None:
        kv_heads = len(head_pages.head_cluster)
    tiles = tiles or QueryTiles.from_query_lens(
        metadata.query_lens, queries.device, prefill_config(metadata, head_dim, kv_quant)
    )
    output = torch.empty(tokens, heads, head_dim, dtype=queries.dtype, device=queries.device)
    prefill_kernel[(len(tiles.request_ids), heads)](
        queries, sinks, key_pages, value_pages, metadata.block_tables, *pointers(head_pages, metadata.block_tables),
        metadata.cu_seqlens_q if slots is None else slots, metadata.seq_lens, metadata.cu_seqlens_q, tiles.request_ids,
        tiles.first_tokens, output, scale * LOG2_E, window or NO_WINDOW, queries.stride(0), *strides(head_pages,
        metadata.block_tables), kv_heads, head_dim, heads // kv_heads, BLOCK_SIZE=size, BLOCK_M=tiles.block_m,
        HEAD_DIM=max(padded_head_dim(kv_quant, head_dim), 16), BLOCK_N=tiles.block_n,
        HEADS_PER_PAGE=heads_per_page_of(head_pages), WINDOWED=window is not None, **kernel_constants(kv_quant),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return output


@dataclass(frozen=True)
class QueryTiles:
    """Request and first token of each tile of queries; the same for all layers."""

    request_ids: Tensor  # [tiles], int32
    first_tokens: Tensor
    block_m: int  # query tokens per tile
    block_n: int  # keys per tile
    warps: int
    stages: int

    @classmethod
    def from_query_lens(
        cls, query_lens: Sequence[int], device: torch.device, config: tuple[int, int, int, int]
    ) -> QueryTiles:
        pairs = [(request, first) for request, count in enumerate(query_lens) for first in range(0, count, config[0])]
        tiles = torch.tensor(pairs, dtype=torch.int32).T.contiguous()
        tiles = tiles.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tiles.to(device)
        return cls(tiles[0], tiles[1], *config)
