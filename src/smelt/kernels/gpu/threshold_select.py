"""Add, compare, compact in Triton: one pass over the vector, and one over a bit for each of its elements.

The first kernel adds, writes the sums back, and keeps of the comparison one bit an element, thirty-two in a word. The
second turns bits into indices: where those of a program go is known from the counts of the programs before it, which
the first one has added up. No order of programs matters, so the indices ascend and equal calls give equal bits; the
host waits for nothing unless it asks how many there are. `smelt.kernels.threshold_select` says what is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BITS = 32
TILES = 4096, 8  # elements of a program that adds, and its warps
SUMS = 2048  # counts that are added at once, and empty slots that are filled at once


@triton.jit(do_not_specialize=["begin", "first", "start", "stop"])  # ranges change from step to step
def add_kernel(  # type: ignore[no-untyped-def]
    values, gradient, words, sums, elements, begin, first, start, stop, threshold, WHOLE: tl.constexpr,
    TILE: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A tile, from `begin` on; the range begins in tile `first`. WHOLE: all of it lies inside the vector, so that it
    is read four values at a time, which a mask of any length would forbid."""
    tile = begin + tl.program_id(0)
    base = tile.to(tl.int64) * TILE
    row, bit = tl.arange(0, TILE // BITS), tl.arange(0, BITS)
    lane = row[:, None] * BITS + bit[None, :]  # [words, bits]
    inside = None if WHOLE else lane < (elements - base).to(tl.int32)
    other = None if WHOLE else 0.0
    value = tl.load(values + base + lane, mask=inside, other=other)
    if gradient is not None:
        value += tl.load(gradient + base + lane, mask=inside, other=other).to(tl.float32)
        tl.store(values + base + lane, value, mask=inside)
    low = tl.maximum(start - base, 0).to(tl.int32)
    high = tl.minimum(stop - base, TILE).to(tl.int32)
    if low < high:
        chosen = (lane >= low) & (lane < high) & (tl.abs(value) >= threshold)
        word = tl.sum(tl.where(chosen, 1 << bit[None, :], 0), axis=1)  # no two bits meet: a sum is their union
        own = tile - first
        tl.store(words + own.to(tl.int64) * (TILE // BITS) + row, word)
        number = tl.sum(tl.sum(chosen.to(tl.int32), axis=1), axis=0)
        tl.atomic_add(sums + own // (WORDS * BITS // TILE), number, sem="relaxed")


@triton.jit
def bits_in(word):  # type: ignore[no-untyped-def]
    """How many bits of each uint32 are set, as int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 0x3F).to(tl.int32)


@triton.jit(do_not_specialize=["origin", "length", "groups", "slots"])
def place_kernel(  # type: ignore[no-untyped-def]
    words, sums, result, origin, length, groups, slots, elements, BITS: tl.constexpr, WORDS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """The indices of some words to their slots, and a share of the slots that are left over."""
    group = tl.program_id(0)
    before, total = 0, 0
    for at in range(0, groups, SUMS):
        other = at + tl.arange(0, SUMS)
        found = tl.load(sums + other, mask=other < groups, other=0)
        before += tl.sum(tl.where(other < group, found, 0), axis=0)
        total += tl.sum(found, axis=0)
    if tl.load(sums + group) > 0:
        place = group * WORDS + tl.arange(0, WORDS)
        word = tl.load(words + place, mask=place < length, other=0).to(tl.uint32, bitcast=True)
        number = bits_in(word)
        slot = before + tl.cumsum(number, axis=0) - number
        index = origin + place.to(tl.int64) * BITS
        for _ in range(0, tl.max(number, axis=0)):
            rest = word & (word - 1)
            lowest = bits_in((word ^ rest) - 1)
            tl.store(result + slot, index + lowest, mask=(word != 0) & (slot < slots))
            slot += 1
            word = rest
    for at in range(total + group * SUMS, slots, groups * SUMS):
        slot = at + tl.arange(0, SUMS)
        tl.store(result + slot, tl.zeros([SUMS], tl.int64) + elements, mask=slot < slots)


def words_for(length: int) -> int:
    """Of a program that turns bits into indices: few, so that all multiprocessors have some, but each program adds up
    the counts of all programs."""
    return 2048 if length <= 1 << 21 else 8192


def add_and_select(
    values: Tensor, gradient: Tensor | None, threshold: float, start: int, stop: int, capacity: int | None = None, *,
    tiles: tuple[int, int] | None = None, words: int | None = None,
) -> Tensor:  # fmt: skip
    """values [elements] float32 += gradient of any floating type, both contiguous; without a gradient they are only
    read. -> [slots] int64, as `smelt.kernels.threshold_select` has it. `tiles`: elements of a program, and its warps;
    `words` of a program of the second kernel, which must be those of whole tiles."""
    tile, warps = tiles or TILES
    elements, device = len(values), values.device
    first = start // tile
    count = triton.cdiv(stop, tile) - first if stop > start else 0  # tiles that hold some of the range
    length = count * (tile // BITS)
    words = words or words_for(length)
    groups = max(triton.cdiv(length, words), 1)
    bits = torch.empty(length, dtype=torch.int32, device=device)
    sums = torch.zeros(groups, dtype=torch.int32, device=device)
    begin, end = (first, first + count) if gradient is None else (0, triton.cdiv(elements, tile))
    full = elements // tile
    for low, high, whole in ((begin, min(end, full), True), (max(begin, full), end, False)):
        if low < high:
            add_kernel[(high - low,)](
                values, gradient, bits, sums, elements, low, first, start, stop, threshold, WHOLE=whole, TILE=tile,
                BITS=BITS, WORDS=words, num_warps=warps,
            )  # fmt: skip
    if capacity is None:
        capacity = int(sums.sum())
    result = torch.empty(capacity, dtype=torch.int64, device=device)
    if capacity:
        place_kernel[(groups,)](
            bits, sums, result, first * tile, length, groups, capacity, elements, BITS=BITS, WORDS=words, SUMS=SUMS,
            num_warps=8,
        )  # fmt: skip
    return result
