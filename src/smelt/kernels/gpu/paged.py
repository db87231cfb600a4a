"""Attention over a paged cache in Triton: one query a request with its keys split among programs, or many queries.

The heads that share keys and values are computed together, so that keys are read once. `smelt.kernels.paged` says what
is computed. Pages hold all heads of a layer, [block, token, head, width], or those of a cluster that may be of several
layers, [block, column, token, width]; then every head has its own length. With a row format they hold bytes.
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
from smelt.kernels.gpu.pages import ClusteredHeadPages, columns_of, head_pages, key_rows, pointers, strides
from smelt.kernels.gpu.rope import RotaryParams, turned
from smelt.kernels.gpu.rows import as_read, as_written, constants, lift, load_rows, met, width_of, write_row
from smelt.kernels.kv_quant import KVQuantFormat

LOG2_E = 1.4426950408889634
BLOCK_N = 64  # that are taken at once when decoding
PREFILL_TILES = 64, 64, 4, 2  # queries of a program, keys that are taken at once, warps, stages
LONG_TILES = 128, 128, 8, 2  # where many queries of a request meet many keys
LONG_NARROW_TILES = 128, 64, 8, 3  # the same with heads of up to 64
LONG_CODE_TILES = 128, 64, 8, 2  # the same with codes, which need registers to become numbers
WAVES = 2  # programs for every multiprocessor, at most, when keys are split


@triton.jit
def load_keys(  # type: ignore[no-untyped-def]
    key_pages, value_pages, table, start, end, block_rows, token_rows, first_row, lane, width, DTYPE: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, ROW: tl.constexpr, HALF_ROW: tl.constexpr,
    ALL: tl.constexpr = False,
):  # fmt: skip
    """Keys and values of the positions from `start` on [KEYS, WIDTH], which of them are before `end` (`ALL`: known to
    be), and their scales."""
    positions = start + tl.arange(0, KEYS)
    there = tl.full([KEYS], True, tl.int1) if ALL else positions < end
    rows = key_rows(table, positions, there, block_rows, token_rows, first_row, SIZE)
    keys, key_scales = load_rows(key_pages, rows, there, lane, width, DTYPE, FORMAT, ROW, HALF_ROW)
    values, value_scales = load_rows(value_pages, rows, there, lane, width, DTYPE, FORMAT, ROW, HALF_ROW)
    return keys, values, there, key_scales, value_scales


@triton.jit
def take_keys(  # type: ignore[no-untyped-def]
    scores, scale, seen, values, key_scales, value_scales, largest, total, mixed, FORMAT: tl.constexpr,
    ALL: tl.constexpr = False,
):  # fmt: skip
    """One more tile of keys into the softmax so far. Times `scale`, scores are in powers of two. `ALL` are seen."""
    if FORMAT:
        scores = scores * key_scales[None, :]
    if not ALL:
        scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    base = new_largest if ALL else tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores * scale - base[:, None])
    faded = tl.exp2(largest - base)
    total = total * faded + tl.sum(weights, axis=1)
    if FORMAT:
        weights = weights * (value_scales * lift(FORMAT))[None, :]
    mixed = mixed * faded[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_largest, total, mixed


@triton.jit
def take_tile(  # type: ignore[no-untyped-def]
    query, key_pages, value_pages, table, start, end, block_rows, token_rows, first_row, lane, width, scale, largest,
    total, mixed, SIZE: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, ROW: tl.constexpr,
    HALF_ROW: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The keys from `start` on, as many as are taken at once; every query sees those before `end`, which are `ALL` or
    not."""
    keys, values, there, key_scales, value_scales = load_keys(
        key_pages, value_pages, table, start, end, block_rows, token_rows, first_row, lane, width, query.dtype, SIZE,
        KEYS, FORMAT, ROW, HALF_ROW, ALL,
    )  # fmt: skip
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    return take_keys(
        scores, scale, there[None, :], values, key_scales, value_scales, largest, total, mixed, FORMAT, ALL
    )


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGS)
def decode_kernel(  # type: ignore[no-untyped-def]
    mixed, cosines, sines, query_norm, key_norm, key_pages, value_pages, tables, shifts, cluster, column, work, slots,
    lengths, results, partial, statistics, arrived, scale, window, epsilon, stride, table_stride, cluster_stride,
    shift_stride, kv_heads, width, SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
    COLUMNS: tl.constexpr, FORMAT: tl.constexpr, ROW: tl.constexpr, HALF_ROW: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """One new token a request: a program has one head of keys and one of its parts of the length, of which there are
    SPLITS, or where heads differ as many as `work` says. The first part has the new token, whose keys and values it
    also writes to their page; the part that ends last puts all together."""
    request = tl.program_id(0).to(tl.int64)
    if COLUMNS:
        item = work + tl.program_id(1) * 3
        head, split, parts = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    else:
        head, split, parts = tl.program_id(1), tl.program_id(2), SPLITS
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    row, lane = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    within = lane < width
    held = (row < GROUP)[:, None] & within[None, :]
    text = tl.load(lengths + request).to(tl.int32)
    table, shift, block_rows, token_rows, first_row = head_pages(
        tables, shifts, cluster, column, tl.load(slots + request), head, table_stride, cluster_stride, shift_stride,
        kv_heads, SIZE, COLUMNS,
    )  # fmt: skip
    length = tl.where(text > 0, text + shift, 0)
    low = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - 1 - low, parts), KEYS) * KEYS
    begin = low + split * share
    end = tl.minimum(begin + share, length - 1)
    if SPLITS > 1:  # few keys for each program: the first ones, written by steps before this one, need not wait
        first_keys, first_values, first_there, first_key_scales, first_value_scales = load_keys(
            key_pages, value_pages, table, begin, end, block_rows, token_rows, first_row, lane, width, DTYPE, SIZE,
            KEYS, FORMAT, ROW, HALF_ROW,
        )  # fmt: skip
    if PDL:  # what the kernels before this one wrote is read from here on
        gdc_wait()
        gdc_launch_dependents()
    angle = tl.maximum(text - 1, 0)
    source = mixed + request * stride
    query_place = (head * GROUP + row)[:, None] * width
    query = turned(
        source, query_place, held, query_norm, cosines, sines, angle, lane[None, :], epsilon, width, HALF, NORM
    )
    query = met(query, DTYPE, TURNS)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    if (split == 0) & (length > 0):
        key_place = (kv_heads * GROUP + head) * width
        key = turned(source, key_place, within, key_norm, cosines, sines, angle, lane, epsilon, width, HALF, NORM)
        value = tl.load(source + key_place + kv_heads * width + lane, mask=within, other=0.0)
        row_of_new = key_rows(table, length - 1, length > 0, block_rows, token_rows, first_row, SIZE)
        key = write_row(key_pages, row_of_new, met(key, DTYPE, TURNS), length > 0, lane, width, FORMAT, ROW, HALF_ROW)
        value = write_row(value_pages, row_of_new, value, length > 0, lane, width, FORMAT, ROW, HALF_ROW)
        largest = tl.sum(query.to(tl.float32) * key[None, :], axis=1) * scale
        total = tl.full([ROWS], 1.0, tl.float32)
        found = found + as_read(value[None, :] * lift(FORMAT), FORMAT, HALF_ROW)
    query = as_read(query, FORMAT, HALF_ROW)
    if SPLITS > 1:
        scores = tl.dot(query, tl.trans(first_keys), input_precision="ieee")
        largest, total, found = take_keys(
            scores, scale, first_there[None, :], first_values, first_key_scales, first_value_scales, largest, total,
            found, FORMAT,
        )  # fmt: skip
        begin += KEYS
    whole = begin + tl.maximum(end - begin, 0) // KEYS * KEYS  # up to here all keys of a tile are there
    for start in range(begin, whole, KEYS):
        largest, total, found = take_tile(
            query, key_pages, value_pages, table, start, end, block_rows, token_rows, first_row, lane, width, scale,
            largest, total, found, SIZE, KEYS, FORMAT, ROW, HALF_ROW, True,
        )  # fmt: skip
    if whole < end:
        largest, total, found = take_tile(
            query, key_pages, value_pages, table, whole, end, block_rows, token_rows, first_row, lane, width, scale,
            largest, total, found, SIZE, KEYS, FORMAT, ROW, HALF_ROW, False,
        )  # fmt: skip
    if FORMAT:
        found = as_written(found * (1.0 / lift(FORMAT)), FORMAT, HALF_ROW)
    heads = kv_heads * GROUP
    if SPLITS == 1:
        found = found / tl.where(total == 0.0, 1.0, total)[:, None]
        to = results + request * heads * width + query_place + lane[None, :]
        tl.store(to, found.to(results.dtype.element_ty), mask=held)
    else:
        at = (request * heads + head * GROUP + row) * SPLITS + split
        tl.store(partial + at[:, None] * width + lane[None, :], found, mask=held)
        tl.store(statistics + at * 2, largest, mask=row < GROUP)
        tl.store(statistics + at * 2 + 1, total, mask=row < GROUP)
        tl.debug_barrier()  # all threads have written
        before = tl.atomic_add(arrived + request * kv_heads + head, 1, sem="acq_rel")
        if before == parts - 1:
            tl.store(arrived + request * kv_heads + head, 0)
            for member in tl.static_range(GROUP):
                at_member = request * heads + head * GROUP + member
                merge_parts(partial, statistics, results, at_member, parts, width, SPLITS, WIDTH)


@triton.jit
def merge_parts(partial, statistics, results, at, parts, width, SPLITS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The parts of one head of one request."""
    split, lane = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    there = split < parts
    place = statistics + (at * SPLITS + split) * 2
    largest = tl.load(place, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(place + 1, mask=there, other=0.0, cache_modifier=".cg")
    top = tl.max(largest, axis=0)
    faded = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
    inside = (lane < width)[None, :] & (total > 0)[:, None]
    results_of_parts = partial + (at * SPLITS + split)[:, None] * width + lane[None, :]
    mixed = tl.load(results_of_parts, mask=inside, other=0.0, cache_modifier=".cg")
    whole = tl.sum(total * faded, axis=0)
    found = tl.sum(mixed * faded[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(results + at * width + lane, found.to(results.dtype.element_ty), mask=lane < width)


@triton.jit
def take_range(  # type: ignore[no-untyped-def]
    query, position, key_pages, value_pages, table, begin, end, block_rows, token_rows, first_row, lane, width, scale,
    window, largest, total, mixed, SIZE: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, ROW: tl.constexpr,
    HALF_ROW: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Keys from `begin` to `end` into the softmax of many queries; `ALL`: every query sees them all."""
    for at in range(begin, end, KEYS):
        keys, values, there, key_scales, value_scales = load_keys(
            key_pages, value_pages, table, at, end, block_rows, token_rows, first_row, lane, width, query.dtype, SIZE,
            KEYS, FORMAT, ROW, HALF_ROW, ALL,
        )  # fmt: skip
        keys_at = at + tl.arange(0, KEYS)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        seen = (keys_at[None, :] <= position[:, None]) & (keys_at[None, :] > position[:, None] - window)
        largest, total, mixed = take_keys(
            scores, scale, seen & there[None, :], values, key_scales, value_scales, largest, total, mixed, FORMAT, ALL
        )
    return largest, total, mixed


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGS)
def prefill_kernel(  # type: ignore[no-untyped-def]
    queries, key_pages, value_pages, tables, shifts, cluster, column, slots, lengths, starts, tile_request, tile_first,
    results, scale, window, query_stride, table_stride, cluster_stride, shift_stride, kv_heads, width, group,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    WINDOWED: tl.constexpr, FORMAT: tl.constexpr, ROW: tl.constexpr, HALF_ROW: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS query tokens of one request, one head of queries. Most keys are seen by all of them; only those at
    the ends are compared with positions."""
    tile, query_head = tl.program_id(0), tl.program_id(1)
    request, first = tl.load(tile_request + tile), tl.load(tile_first + tile)
    start, stop = tl.load(starts + request).to(tl.int32), tl.load(starts + request + 1).to(tl.int32)
    head = query_head // group
    slot = tl.load(slots + request) if COLUMNS else request.to(tl.int64)
    table, shift, block_rows, token_rows, first_row = head_pages(
        tables, shifts, cluster, column, slot, head, table_stride, cluster_stride, shift_stride, kv_heads, SIZE, COLUMNS
    )
    length = tl.load(lengths + request).to(tl.int32) + shift
    row, lane = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token = start + first + row
    held = (token < stop)[:, None] & (lane < width)[None, :]
    lowest = length - (stop - start) + first  # position of the first query
    position = lowest + row
    place = query_head * width + lane[None, :]
    query = tl.load(queries + token.to(tl.int64)[:, None] * query_stride + place, mask=held, other=0.0)
    query = as_read(query, FORMAT, HALF_ROW)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    begin = tl.maximum(lowest - window + 1, 0) // KEYS * KEYS
    end = tl.minimum(lowest + ROWS, length)
    to_all = (lowest + 1) // KEYS * KEYS  # up to here every query sees every key that is in its window
    if WINDOWED:
        inside = tl.cdiv(tl.maximum(lowest + ROWS - window, 0), KEYS) * KEYS  # from here on they are in every window
        inside = tl.minimum(tl.maximum(inside, begin), tl.maximum(to_all, begin))
        largest, total, mixed = take_range(
            query, position, key_pages, value_pages, table, begin, inside, block_rows, token_rows, first_row, lane,
            width, scale, window, largest, total, mixed, SIZE, KEYS, FORMAT, ROW, HALF_ROW, False,
        )  # fmt: skip
        begin = inside
    largest, total, mixed = take_range(
        query, position, key_pages, value_pages, table, begin, to_all, block_rows, token_rows, first_row, lane, width,
        scale, window, largest, total, mixed, SIZE, KEYS, FORMAT, ROW, HALF_ROW, True,
    )  # fmt: skip
    largest, total, mixed = take_range(
        query, position, key_pages, value_pages, table, tl.maximum(begin, to_all), end, block_rows, token_rows,
        first_row, lane, width, scale, window, largest, total, mixed, SIZE, KEYS, FORMAT, ROW, HALF_ROW, False,
    )  # fmt: skip
    mixed = as_written(mixed, FORMAT, HALF_ROW) / tl.where(total == 0.0, 1.0, total * lift(FORMAT))[:, None]
    heads = kv_heads * group
    to = token.to(tl.int64)[:, None] * heads * width + place
    tl.store(results + to, mixed.to(results.dtype.element_ty), mask=held)


EVERYTHING = 2**30  # a window that hides nothing


def num_splits(requests: int, kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """Into how many parts keys are split, a power of two: as many as keep the processors busy, and no shorter than a
    few tiles each."""
    most = min(WAVES * num_sms // max(requests * kv_heads, 1), max_seq_len // (2 * BLOCK_N))
    return 1 << max(most, 1).bit_length() - 1


def decode_config(programs: int, splits: int, max_seq_len: int, num_sms: int) -> tuple[int, int, int]:
    """Keys that are taken at once, warps, stages: small programs where there are many, larger ones where there are few,
    and more so where each has many keys."""
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
    """One new token of each request of a batch. A length of 0 only fills the batch."""

    slots: Tensor  # [requests], int64: its row of the tables
    seq_lens: Tensor  # [requests], int64: tokens of the text, the new one included
    block_tables: Tensor  # [slots, most blocks], int32, or [slots, clusters, most blocks]
    split_counters: Tensor  # [at least requests * kv heads], int32: zeros, before and after every call
    max_seq_len: int  # of the lengths, at most


def paged_decode(
    qkv: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: DecodeMetadata, rotary: RotaryParams, scale: float,
    window: int | None = None, *, head_pages: ClusteredHeadPages | None = None, splits: int | None = None,
    config: tuple[int, int, int] | None = None, kv_quant: KVQuantFormat | None = None,
) -> Tensor:  # fmt: skip
    """Queries, keys and values of new tokens [requests, (heads + 2 * kv heads) * width], not yet turned; the keys and
    values also go to their pages. -> [requests, heads * width]. `tiles`: keys that are taken at once, warps, stages.
    With `pages` the cache is [blocks * columns, size, 1, width], and `splits` the most parts that its work has."""
    requests = len(qkv)
    _, size, kv_heads, last = key_pages.shape
    width = width_of(kv_quant, last)
    if head_pages is not None:
        kv_heads = len(head_pages.head_cluster)
    heads = qkv.shape[1] // width - 2 * kv_heads
    group, padded = heads // kv_heads, max(triton.next_power_of_2(width), 16)
    chip, about = num_sms(qkv.device), triton.next_power_of_2(requests)  # so that few kernels are compiled
    if splits is None:
        splits = num_splits(about, kv_heads, metadata.max_seq_len, chip)
    work = metadata.slots if head_pages is None or head_pages.split_work is None else head_pages.split_work
    grid = (requests, kv_heads, splits) if head_pages is None else (requests, len(work), 1)
    tile_keys, warps, stages = config or decode_config(about * math.prod(grid[1:]), splits, metadata.max_seq_len, chip)
    results = torch.empty(requests, heads * width, dtype=qkv.dtype, device=qkv.device)
    partial = statistics = results
    if splits > 1:
        partial = torch.empty(requests, heads, splits, width, dtype=torch.float32, device=qkv.device)
        statistics = torch.empty(requests, heads, splits, 2, dtype=torch.float32, device=qkv.device)
    query_norm, key_norm = rotary.qk_norms or (rotary.cos, rotary.cos)
    decode_kernel[grid](
        qkv, rotary.cos, rotary.sin, query_norm, key_norm, key_pages, value_pages, metadata.block_tables,
        *pointers(head_pages, metadata.block_tables), work, metadata.slots, metadata.seq_lens, results, partial,
        statistics, metadata.split_counters, scale * LOG2_E, window or EVERYTHING, rotary.eps, qkv.stride(0),
        *strides(head_pages, metadata.block_tables), kv_heads, width, SIZE=size, GROUP=group,
        ROWS=max(triton.next_power_of_2(group), 16), WIDTH=padded, HALF=width // 2, KEYS=tile_keys, SPLITS=splits,
        NORM=rotary.qk_norms is not None, PDL=PDL, COLUMNS=columns_of(head_pages), **constants(kv_quant),
        num_warps=warps, num_stages=stages, launch_pdl=PDL,
    )  # fmt: skip
    return results


def paged_prefill(
    queries: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: AttentionMetadata, scale: float,
    window: int | None = None, *, tiles: QueryTiles | None = None, head_pages: ClusteredHeadPages | None = None,
    slots: Tensor | None = None,
    kv_quant: KVQuantFormat | None = None,
) -> Tensor:  # fmt: skip
    """Many query tokens: [tokens, heads, width] -> the same. `tiles` are those of the pages, where they are known. With
    `heads_own` the tables are those of all slots, and `slots` [requests] says whose each request's are. With a row
    format that turns, queries come turned."""
    tokens, heads, width = queries.shape
    _, size, kv_heads, _ = key_pages.shape
    if head_pages is not None:
        kv_heads = len(head_pages.head_cluster)
    tiles = tiles or QueryTiles.of(metadata.query_lens, queries.device, prefill_config(metadata, width, kv_quant))
    results = torch.empty(tokens, heads, width, dtype=queries.dtype, device=queries.device)
    told = {name: value for name, value in constants(kv_quant).items() if name != "TURNS"}
    prefill_kernel[(len(tiles.request_ids), heads)](
        queries, key_pages, value_pages, metadata.block_tables, *pointers(head_pages, metadata.block_tables),
        metadata.cu_seqlens_q if slots is None else slots, metadata.seq_lens, metadata.cu_seqlens_q, tiles.request_ids,
        tiles.first_tokens, results, scale * LOG2_E, window or EVERYTHING, queries.stride(0),
        *strides(head_pages, metadata.block_tables), kv_heads, width, heads // kv_heads, SIZE=size, ROWS=tiles.block_m,
        WIDTH=max(triton.next_power_of_2(width), 16), KEYS=tiles.block_n, COLUMNS=columns_of(head_pages),
        WINDOWED=window is not None, **told, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return results


@dataclass(frozen=True)
class QueryTiles:
    """Which request each tile of queries belongs to, and its first token there; the same for all layers."""

    request_ids: Tensor  # [tiles], int32
    first_tokens: Tensor
    block_m: int  # query tokens of a tile
    block_n: int  # that are taken at once
    warps: int
    stages: int

    @classmethod
    def of(cls, query_lens: Sequence[int], device: torch.device, config: tuple[int, int, int, int]) -> QueryTiles:
        pairs = [(request, first) for request, count in enumerate(query_lens) for first in range(0, count, config[0])]
        both = torch.tensor(pairs, dtype=torch.int32).T.contiguous()
        both = both.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else both.to(device)
        return cls(both[0], both[1], *config)
