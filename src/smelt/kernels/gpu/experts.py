"""Mixtures of experts in Triton: choose the experts of each token, sort the pairs by expert, and add up their results.

A token and one of its top-k experts are a pair. Grouped GEMMs (`grouped.py`) need the pairs of an expert next to each
other, in tiles of at most `tile_size` rows of one expert. Nothing is read back: launches depend on the number of tokens
alone, and the number of tiles stays on the device. Pairs keep their order, and all sums have a fixed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gpu.activations import QuantizedRows, RowQuant, store_quantized
from smelt.kernels.gpu.arch import PDL
from smelt.kernels.gpu.fused_ops import quant_constants

COPY_PROGRAMS = 32  # per expert: enough reads in flight to occupy the bus to host memory
MAX_RANKED_PAIRS = 32  # largest number of pairs that one program routes and sorts by comparing them with each other


@dataclass(frozen=True)
class Routing:
    """The pairs of a batch, sorted by expert. Padding tokens have none: their entries are -1, or `num_experts`."""

    weights: Tensor  # [tokens, top_k], float32
    experts: Tensor  # [tokens, top_k], int32
    rows: Tensor  # [tokens, top_k], int32: the place of each pair among the sorted ones
    pairs: Tensor  # [tokens * top_k], int32: the pair at each place
    row_experts: Tensor  # [tokens * top_k], int32: the expert at each place
    tiles: Tensor  # [max_tiles, 4], int32: expert, first row, number of rows, unused
    num_tiles: Tensor  # [1], int32
    tile_size: int

    @property
    def num_tokens(self) -> int:
        return self.weights.shape[0]

    @property
    def top_k(self) -> int:
        return self.weights.shape[1]

    @property
    def num_pairs(self) -> int:
        return self.weights.numel()

    @property
    def max_tiles(self) -> int:
        return self.tiles.shape[0]


def max_tiles(pairs: int, num_experts: int, tile_size: int) -> int:
    """Return how many tiles pairs can need at most: every expert may have one that is not full."""
    return max(1, min(pairs, pairs // tile_size + min(num_experts, pairs)))


@triton.jit
def softmax_experts(logits, token, expert, tokens, num_experts):  # type: ignore[no-untyped-def]
    """Return the probabilities of experts [tokens, experts]; -1 outside, and 0 instead of NaN, so that indices stay in
    range (the experts then compute with the NaN themselves)."""
    inside = (token < tokens)[:, None] & (expert < num_experts)[None, :]
    address = logits + token.to(tl.int64)[:, None] * num_experts + expert[None, :]
    x = tl.where(
        (expert < num_experts)[None, :], tl.load(address, mask=inside, other=0.0).to(tl.float32), float("-inf")
    )
    power = tl.exp(x - tl.max(x, axis=1)[:, None])
    probabilities = power / tl.sum(power, axis=1)[:, None]
    probabilities = tl.where(probabilities == probabilities, probabilities, 0.0)
    return tl.where((expert < num_experts)[None, :], probabilities, -1.0)


@triton.jit
def top_experts(probabilities, expert, TOP_K: tl.constexpr, SLOTS: tl.constexpr, NORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return indices and probabilities of the TOP_K most likely experts [tokens, SLOTS], in order; ties go to the
    first."""
    slot = tl.arange(0, SLOTS)[None, :]
    index = tl.zeros([probabilities.shape[0], SLOTS], tl.int32)
    value = tl.zeros([probabilities.shape[0], SLOTS], tl.float32)
    total = tl.zeros([probabilities.shape[0]], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(probabilities, axis=1)
        first = tl.min(tl.where(probabilities == best[:, None], expert[None, :], probabilities.shape[1]), axis=1)
        index = tl.where(slot == k, first[:, None], index)
        value = tl.where(slot == k, best[:, None], value)
        total += best
        probabilities = tl.where(expert[None, :] == first[:, None], -2.0, probabilities)
    if NORMALIZE:
        value = value / total[:, None]
    return index, value


@triton.jit
def is_padding(active, token, tokens):  # type: ignore[no-untyped-def]
    if active is None:
        padding = token >= tokens
    else:
        padding = tl.load(active + token, mask=token < tokens, other=0) == 0
    return padding


@triton.jit
def store_top_k(  # type: ignore[no-untyped-def]
    logits, active, weights, experts, token, expert, slot, tokens, num_experts, TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Choose and store the experts of tokens; return experts, numbers of the pairs and their mask [TOKENS, SLOTS]."""
    probabilities = softmax_experts(logits, token, expert, tokens, num_experts)
    index, value = top_experts(probabilities, expert, TOP_K, SLOTS, NORMALIZE)
    index = tl.where(is_padding(active, token, tokens)[:, None], num_experts, index)
    pair = token[:, None] * TOP_K + slot[None, :]
    inside = (token < tokens)[:, None] & (slot < TOP_K)[None, :]
    tl.store(weights + pair, value.to(WEIGHT_DTYPE).to(tl.float32), mask=inside)
    tl.store(experts + pair, index, mask=inside)
    return index, pair, inside


@triton.jit
def top_k_kernel(  # type: ignore[no-untyped-def]
    logits, active, weights, experts, tokens, num_experts, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of TOKENS tokens per program."""
    token, expert, slot = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    store_top_k(
        logits, active, weights, experts, token, expert, slot, tokens, num_experts, TOP_K, NORMALIZE, WEIGHT_DTYPE,
        SLOTS,
    )  # fmt: skip


@triton.jit
def sort_pairs_kernel(  # type: ignore[no-untyped-def]
    experts, rows, pairs, row_experts, tiles, num_tiles, num_pairs, num_experts, TILE: tl.constexpr,
    BINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sort pairs by expert: one expert per program, which finds its pairs among all; the last has those of padding."""
    expert, bin_, lane = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        chosen = tl.load(experts + start + lane, mask=start + lane < num_pairs, other=BINS - 1)
        counts += tl.histogram(chosen, BINS)
    counts = tl.where(bin_ <= num_experts, counts, 0)
    count = tl.sum(tl.where(bin_ == expert, counts, 0), axis=0)
    first = tl.sum(tl.where(bin_ < expert, counts, 0), axis=0)
    expert_tiles = tl.where(bin_ < num_experts, (counts + TILE - 1) // TILE, 0)
    first_tile = tl.sum(tl.where(bin_ < expert, expert_tiles, 0), axis=0)
    if expert == num_experts:
        tl.store(num_tiles, first_tile)
    else:
        for tile in range(0, (count + TILE - 1) // TILE):
            target = tiles + (first_tile + tile) * 4
            tl.store(target, expert)
            tl.store(target + 1, first + tile * TILE)
            tl.store(target + 2, tl.minimum(count - tile * TILE, TILE))
    for start in range(0, tl.where(count > 0, num_pairs, 0), BLOCK):
        pair = start + lane
        mine = tl.load(experts + pair, mask=pair < num_pairs, other=BINS - 1) == expert
        row = first + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(rows + pair, tl.where(expert < num_experts, row, -1), mask=mine)
        tl.store(pairs + row, tl.where(expert < num_experts, pair, -1), mask=mine)
        tl.store(row_experts + row, expert, mask=mine)
        first += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def route_kernel(  # type: ignore[no-untyped-def]
    logits, active, weights, experts, rows, pairs, row_experts, tiles, num_tiles, tokens, num_experts,
    TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of few tokens, and sort their pairs, in one program: a pair's place is the number of pairs
    before it."""
    token, expert, slot = tl.arange(0, TOKENS), tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    index, pair, inside = store_top_k(
        logits, active, weights, experts, token, expert, slot, tokens, num_experts, TOP_K, NORMALIZE, WEIGHT_DTYPE,
        SLOTS,
    )  # fmt: skip
    chosen = tl.reshape(tl.where(inside, index, EXPERTS + 1), [TOKENS * SLOTS])  # what is no pair comes last
    pair = tl.reshape(pair, [TOKENS * SLOTS])
    order = chosen * (TOKENS * SLOTS) + tl.arange(0, TOKENS * SLOTS)
    before = order[None, :] < order[:, None]
    row = tl.sum(before.to(tl.int32), axis=1)
    position = row - tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), axis=1)  # among the pairs of the expert
    count = tl.sum((chosen[None, :] == chosen[:, None]).to(tl.int32), axis=1)
    valid = chosen < num_experts
    starts = valid & (position % TILE == 0)
    tile = tl.sum((before & starts[None, :]).to(tl.int32), axis=1)
    target = tiles + tile * 4
    tl.store(target, chosen, mask=starts)
    tl.store(target + 1, row, mask=starts)
    tl.store(target + 2, tl.minimum(count - position, TILE), mask=starts)
    tl.store(num_tiles, tl.max(tl.where(starts, tile + 1, 0), axis=0))
    exists = chosen <= num_experts
    tl.store(rows + pair, tl.where(valid, row, -1), mask=exists)
    tl.store(pairs + row, tl.where(valid, pair, -1), mask=exists)
    tl.store(row_experts + row, chosen, mask=exists)


def route(
    logits: Tensor, top_k: int, *, normalize: bool, weight_dtype: torch.dtype, tile_size: int,
    active: Tensor | None = None,
) -> Routing:  # fmt: skip
    """Route tokens by the router's logits [tokens, experts]: softmax, then the `top_k` largest.

    `normalize`: the weights of a token add up to 1; they are rounded to `weight_dtype`. Tokens that are not `active`
    (bool [tokens]) are padding.
    """
    tokens, num_experts = logits.shape
    num_pairs, device = tokens * top_k, logits.device
    integers = partial(torch.empty, dtype=torch.int32, device=device)
    routing = Routing(
        weights=torch.empty(tokens, top_k, dtype=torch.float32, device=device),
        experts=integers(tokens, top_k), rows=integers(tokens, top_k),
        pairs=integers(num_pairs), row_experts=integers(num_pairs),
        tiles=integers(max_tiles(num_pairs, num_experts, tile_size), 4),
        num_tiles=integers(1), tile_size=tile_size,
    )  # fmt: skip
    # Sums have an element for each thread: Triton may count twice what several threads hold after a reshape.
    padded_tokens, padded = triton.next_power_of_2(tokens), max(triton.next_power_of_2(num_experts), 64)
    slots = max(triton.next_power_of_2(top_k), 8 if tokens == 1 else 16 // padded_tokens)
    constants = {
        "TOP_K": top_k, "NORMALIZE": normalize, "WEIGHT_DTYPE": _DTYPES[weight_dtype], "SLOTS": slots,
        "EXPERTS": padded, "PDL": PDL, "launch_pdl": PDL,
    }  # fmt: skip
    active = None if active is None else active.view(torch.uint8)
    if padded_tokens * slots <= MAX_RANKED_PAIRS:
        route_kernel[(1,)](
            logits, active, routing.weights, routing.experts, routing.rows, routing.pairs, routing.row_experts,
            routing.tiles, routing.num_tiles, tokens, num_experts, **constants, TOKENS=padded_tokens, TILE=tile_size,
            num_warps=1 if tokens == 1 else 4,
        )  # fmt: skip
        return routing
    per_program = max(1, min(4, 512 // padded))
    top_k_kernel[(triton.cdiv(tokens, per_program),)](
        logits, active, routing.weights, routing.experts, tokens, num_experts, **constants, TOKENS=per_program,
        num_warps=1,
    )  # fmt: skip
    sort_pairs_kernel[(num_experts + 1,)](
        routing.experts, routing.rows, routing.pairs, routing.row_experts, routing.tiles, routing.num_tiles, num_pairs,
        num_experts, TILE=tile_size, BINS=max(triton.next_power_of_2(num_experts + 2), 128), BLOCK=1024, PDL=PDL,
        num_warps=4, launch_pdl=PDL,
    )  # fmt: skip
    return routing


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def gather_kernel(  # type: ignore[no-untyped-def]
    x, pairs, row_experts, result, scales, static_scale, width, top_k, clip_ratio, AMAX_CODE: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy the token of a sorted pair, and quantize it if AMAX_CODE is not 0. One pair per program."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.load(pairs + row)
    inside = (lane < width) & (pair >= 0)
    value = tl.load(x + (pair // top_k).to(tl.int64) * width + lane, mask=inside, other=0.0)
    if AMAX_CODE > 0.0:
        if static_scale is not None:
            static_scale += tl.load(row_experts + row)
        store_quantized(
            value.to(tl.float32), inside, result, scales, row, width, lane, static_scale, clip_ratio, AMAX_CODE,
            SCALE_DTYPE,
        )  # fmt: skip
    else:
        tl.store(result + row * width + lane, value, mask=inside)


def gather_rows(x: Tensor, routing: Routing, quant: RowQuant | None) -> Tensor | QuantizedRows:
    """Copy tokens [tokens, width] to the rows of their pairs [pairs, width], quantized if asked: with static
    scales of each expert, and one more for padding."""
    pairs, width = routing.num_pairs, x.shape[1]
    padded = triton.next_power_of_2(width)
    empty = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    result = empty if quant is None else QuantizedRows.empty(empty, width, quant)
    codes, scales = (result, None) if isinstance(result, Tensor) else (result.codes, result.scales)
    gather_kernel[(pairs,)](
        x, routing.pairs, routing.row_experts, codes, scales, quant and quant.static_scale, width,
        routing.top_k, quant.clip_ratio if quant else 1.0, **quant_constants(quant), BLOCK=padded, PDL=PDL,
        num_warps=max(1, min(8, padded // 512)), launch_pdl=PDL,
    )  # fmt: skip
    return result


@triton.jit
def copy_experts_kernel(source, target, places, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    expert, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + expert)
    for start in range(block * BLOCK, tl.where(place >= 0, size, 0), tl.num_programs(1) * BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < size
        tl.store(target + place * size + offset, tl.load(source + expert * size + offset, mask=inside), mask=inside)


def copy_experts(source: Tensor, target: Tensor, places: Tensor) -> None:
    """Copy the matrices of experts [experts, rows, columns] to their `places` [experts], int64, in `target`; those with
    a negative one are left out. The source may be in pinned host memory: what is copied is decided on the device, so a
    CUDA graph can hold the copies."""
    size = source[0].numel()
    assert source.is_contiguous() and target.is_contiguous() and target[0].numel() == size
    block = min(4096, triton.next_power_of_2(size))
    programs = min(triton.cdiv(size, block), COPY_PROGRAMS)
    copy_experts_kernel[(len(source), programs)](source, target, places, size, BLOCK=block, num_warps=8)


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    y, weights, rows, hidden, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Add the weighted results of a token's experts to its hidden state, in the order of the experts' ranks."""
    token, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(rows + token * TOP_K + k).to(tl.int64)
        result = tl.load(y + row * width + lane, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        total += result * tl.load(weights + token * TOP_K + k)
    address = hidden + token * width + lane
    total += tl.load(address, mask=inside, other=0.0).to(tl.float32)
    tl.store(address, total.to(hidden.dtype.element_ty), mask=inside)


def combine(y: Tensor, routing: Routing, hidden: Tensor) -> None:
    """Add results of pairs [pairs, width], weighted, to the hidden states [tokens, width] in place."""
    tokens, width = hidden.shape
    tile = min(1024, triton.next_power_of_2(width))
    combine_kernel[(tokens, triton.cdiv(width, tile))](
        y, routing.weights, routing.rows, hidden, width, TOP_K=routing.top_k, BLOCK=tile, PDL=PDL,
        num_warps=4, launch_pdl=PDL,
    )  # fmt: skip
