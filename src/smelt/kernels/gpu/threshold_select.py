"""Add a gradient and select above a threshold in Triton: one pass over the vector, and one over a bitmask of it.

The first kernel adds, stores the sums, and writes the comparison as a bitmask, 32 elements per word. The second
converts the bitmask to indices: the output offset of a program is the sum of the counts of the programs before it,
which the first kernel has accumulated. Results do not depend on the order of programs: indices ascend and calls are
deterministic; the host synchronizes only if it needs the count. `smelt.kernels.threshold_select` has the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BITS = 32
TILES = 4096, 8  # elements and warps of a program of the first kernel
SCAN_BLOCK = 2048  # counts added at once, and padding slots filled at once


@triton.jit(do_not_specialize=["begin", "first", "start", "stop"])  # ranges change from step to step
def add_kernel(  # type: ignore[no-untyped-def]
    values, gradient, words, sums, elements, begin, first, start, stop, threshold, UNMASKED: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Process one tile, counted from `begin`; the range starts in tile `first`. UNMASKED: the tile lies inside the
    vector, so that loads are unmasked and vectorized."""
    tile = begin + tl.program_id(0)
    base = tile.to(tl.int64) * BLOCK
    row, bit = tl.arange(0, BLOCK // BITS), tl.arange(0, BITS)
    lane = row[:, None] * BITS + bit[None, :]  # [words, bits]
    inside = None if UNMASKED else lane < (elements - base).to(tl.int32)
    other = None if UNMASKED else 0.0
    value = tl.load(values + base + lane, mask=inside, other=other)
    if gradient is not None:
        value += tl.load(gradient + base + lane, mask=inside, other=other).to(tl.float32)
        tl.store(values + base + lane, value, mask=inside)
    low = tl.maximum(start - base, 0).to(tl.int32)
    high = tl.minimum(stop - base, BLOCK).to(tl.int32)
    if low < high:
        selected = (lane >= low) & (lane < high) & (tl.abs(value) >= threshold)
        word = tl.sum(tl.where(selected, 1 << bit[None, :], 0), axis=1)  # bits are distinct: the sum is their union
        local_tile = tile - first
        tl.store(words + local_tile.to(tl.int64) * (BLOCK // BITS) + row, word)
        count = tl.sum(tl.sum(selected.to(tl.int32), axis=1), axis=0)
        tl.atomic_add(sums + local_tile // (WORDS * BITS // BLOCK), count, sem="relaxed")


@triton.jit
def popcount(word):  # type: ignore[no-untyped-def]
    """Return the population count of each uint32, as int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 0x3F).to(tl.int32)


@triton.jit(do_not_specialize=["origin", "length", "groups", "slots"])
def write_indices_kernel(  # type: ignore[no-untyped-def]
    words, sums, result, origin, length, groups, slots, elements, BITS: tl.constexpr, WORDS: tl.constexpr,
    SCAN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the indices of one group of words to their slots, and fill a share of the unused slots."""
    group = tl.program_id(0)
    before, total = 0, 0
    for start in range(0, groups, SCAN_BLOCK):
        group_index = start + tl.arange(0, SCAN_BLOCK)
        counts = tl.load(sums + group_index, mask=group_index < groups, other=0)
        before += tl.sum(tl.where(group_index < group, counts, 0), axis=0)
        total += tl.sum(counts, axis=0)
    if tl.load(sums + group) > 0:
        word_index = group * WORDS + tl.arange(0, WORDS)
        word = tl.load(words + word_index, mask=word_index < length, other=0).to(tl.uint32, bitcast=True)
        count = popcount(word)
        slot = before + tl.cumsum(count, axis=0) - count
        index = origin + word_index.to(tl.int64) * BITS
        for _ in range(0, tl.max(count, axis=0)):
            remaining = word & (word - 1)
            lowest = popcount((word ^ remaining) - 1)
            tl.store(result + slot, index + lowest, mask=(word != 0) & (slot < slots))
            slot += 1
            word = remaining
    for start in range(total + group * SCAN_BLOCK, slots, groups * SCAN_BLOCK):
        slot = start + tl.arange(0, SCAN_BLOCK)
        tl.store(result + slot, tl.zeros([SCAN_BLOCK], tl.int64) + elements, mask=slot < slots)


def words_per_program(length: int) -> int:
    """Return the number of words per program of the second kernel: small enough to occupy all SMs, but every program
    sums the counts of all programs."""
    return 2048 if length <= 1 << 21 else 8192


def add_and_select(
    values: Tensor, gradient: Tensor | None, threshold: float, start: int, stop: int, capacity: int | None = None, *,
    tiles: tuple[int, int] | None = None, words: int | None = None,
) -> Tensor:  # fmt: skip
    """Add the gradient to `values` [elements] float32 (only read without a gradient) and return indices [slots] int64.

    The contract of `smelt.kernels.threshold_select`; both tensors are contiguous. `tiles`: elements and warps of a
    program; `words`: words per program of the second kernel, a multiple of those of a tile."""
    tile, warps = tiles or TILES
    elements, device = len(values), values.device
    first = start // tile
    count = triton.cdiv(stop, tile) - first if stop > start else 0  # tiles that overlap the range
    length = count * (tile // BITS)
    words = words or words_per_program(length)
    groups = max(triton.cdiv(length, words), 1)
    bits = torch.empty(length, dtype=torch.int32, device=device)
    sums = torch.zeros(groups, dtype=torch.int32, device=device)
    begin, end = (first, first + count) if gradient is None else (0, triton.cdiv(elements, tile))
    full = elements // tile
    for low, high, unmasked in ((begin, min(end, full), True), (max(begin, full), end, False)):
        if low < high:
            add_kernel[(high - low,)](
                values, gradient, bits, sums, elements, low, first, start, stop, threshold, UNMASKED=unmasked,
                BLOCK=tile, BITS=BITS, WORDS=words, num_warps=warps,
            )  # fmt: skip
    if capacity is None:
        capacity = int(sums.sum())
    result = torch.empty(capacity, dtype=torch.int64, device=device)
    if capacity:
        write_indices_kernel[(groups,)](
            bits, sums, result, first * tile, length, groups, capacity, elements, BITS=BITS, WORDS=words,
            SCAN_BLOCK=SCAN_BLOCK, num_warps=8,
        )  # fmt: skip
    return result
