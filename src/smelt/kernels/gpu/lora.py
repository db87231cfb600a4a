"""LoRA in Triton: the low-rank products of the tokens of many adapters, grouped by adapter, in two kernels.

The first multiplies inputs with the down factors, with the columns split over programs and warps; the second sums the
splits in a fixed order, multiplies with the up factors and adds to the outputs of the base layers. Launch the first
before the base product: neither then waits for the launch of the other (programmatic dependent launch). Factors and
tiles are read before the previous kernel has ended, so nothing late in a step may write them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gpu.arch import PDL
from smelt.kernels.lora import MANY_TOKENS, LoraTiles

MAX_BLOCK_R = 32  # rank columns at once
_TILES = ["tile_adapters", "tile_rows"]  # read element by element at any alignment


@triton.jit
def load_tile(rows, column, stop, row_mask, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load columns [BLOCK_K], or [GROUPS, BLOCK_K], of rows -> [rows, BLOCK_K], or [GROUPS, rows, BLOCK_K]."""
    if GROUPS == 1:
        tile = tl.load(rows[:, None] + column[None, :], mask=row_mask[:, None] & (column < stop)[None, :], other=0.0)
    else:
        mask = row_mask[None, :, None] & (column < stop)[:, None, :]
        tile = tl.load(rows[None, :, None] + column[:, None, :], mask=mask, other=0.0)
    return tile


@triton.jit(do_not_specialize_on_alignment=_TILES)
def lora_shrink_kernel(  # type: ignore[no-untyped-def]
    x, down, partial, tile_adapters, tile_rows, columns, x_stride, ranks, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of tokens with some rows of its adapter's down factors, over one split of the columns: GROUPS
    times BLOCK_K at once, summed separately, so that warps share the work."""
    tile, split = tl.program_id(0), tl.program_id(1)
    adapter = tl.load(tile_adapters + tile)
    row = tl.load(tile_rows + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    rank = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    rank_mask, row_mask = (rank < ranks) & (adapter > 0), row >= 0
    step: tl.constexpr = GROUPS * BLOCK_K
    span = tl.cdiv(tl.cdiv(columns, SPLITS), step) * step
    start, stop = split * span, tl.minimum(split * span + span, columns)
    factors = down + (adapter - 1) * ranks * columns + rank.to(tl.int64) * columns
    column = start + tl.arange(0, BLOCK_K)
    if GROUPS > 1:
        column = column[None, :] + tl.arange(0, GROUPS)[:, None] * BLOCK_K
    factor = load_tile(factors, column, stop, rank_mask, GROUPS)
    if PDL:  # every program waits: the kernel must not end before the one that it depends on
        gdc_wait()
        gdc_launch_dependents()
    if adapter > 0:
        inputs = x + row * x_stride
        if GROUPS == 1:
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for _ in range(start, stop, step):
                acc += tl.dot(
                    load_tile(inputs, column, stop, row_mask, GROUPS), tl.trans(factor), input_precision="ieee"
                )
                column += step
                factor = load_tile(factors, column, stop, rank_mask, GROUPS)
            total = acc
        else:
            acc = tl.zeros([GROUPS, BLOCK_M, BLOCK_R], tl.float32)
            for _ in range(start, stop, step):
                value = load_tile(inputs, column, stop, row_mask, GROUPS)
                acc += tl.dot(value, tl.permute(factor, (0, 2, 1)), input_precision="ieee")
                column += step
                factor = load_tile(factors, column, stop, rank_mask, GROUPS)
            total = tl.sum(acc, axis=0)
        result = partial + ((row[:, None] * ranks + rank[None, :]) * SPLITS + split)
        tl.store(result, total, mask=row_mask[:, None] & rank_mask[None, :])


@triton.jit(do_not_specialize_on_alignment=_TILES)
def lora_expand_kernel(  # type: ignore[no-untyped-def]
    partial, up, y, offsets, tile_adapters, tile_rows, columns, rank, ranks, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, SPLITS: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum the splits, multiply with BLOCK_N rows of the up factors of one layer, and add to y. All offsets are
    multiples of ALIGN."""
    tile, layer = tl.program_id(1), tl.program_id(2)
    adapter = tl.load(tile_adapters + tile)
    row = tl.load(tile_rows + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    first, stop = tl.load(offsets + layer), tl.load(offsets + layer + 1)
    column = tl.multiple_of(first, ALIGN) + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = row >= 0
    column_mask = (column < tl.multiple_of(stop, ALIGN)) & (adapter > 0)
    lane = tl.arange(0, BLOCK_R)
    factors = up + (adapter - 1) * columns * rank + column.to(tl.int64)[None, :] * rank
    factor = tl.load(factors + lane[:, None], mask=(lane < rank)[:, None] & column_mask[None, :], other=0.0)
    if PDL:  # every program waits: the kernel must not end before the one that it depends on
        gdc_wait()
        gdc_launch_dependents()
    if (adapter > 0) & (tl.program_id(0) * BLOCK_N < stop - first):
        address = y + row[:, None] * columns + column[None, :]
        inside = row_mask[:, None] & column_mask[None, :]
        value = tl.load(address, mask=inside, other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, rank, BLOCK_R):
            position = start + lane
            if start > 0:
                mask = (position < rank)[:, None] & column_mask[None, :]
                factor = tl.load(factors + position[:, None], mask=mask, other=0.0)
            index = row[:, None] * ranks + layer * rank + position[None, :]
            splits = partial + index[:, :, None] * SPLITS + tl.arange(0, SPLITS)[None, None, :]
            mask = row_mask[:, None, None] & (position < rank)[None, :, None]
            total = tl.sum(tl.load(splits, mask=mask, other=0.0), axis=2)
            acc += tl.dot(total.to(factor.dtype), factor, input_precision="ieee")
        tl.store(address, (value.to(tl.float32) + acc).to(value.dtype), mask=inside)


def lora_shrink(x: Tensor, down: Tensor, tiles: LoraTiles) -> Tensor:
    """Multiply x [tokens, in] with each token's factors in down [adapters, ranks, in] -> [tokens, ranks, splits],
    float32, to be summed over the splits; tokens without an adapter are left uninitialized."""
    (tokens, columns), ranks, (count, width) = x.shape, down.shape[1], tiles.rows.shape
    splits = num_splits(tokens, columns)
    partial = torch.empty(tokens, ranks, splits, dtype=torch.float32, device=x.device)
    groups = 4 if width == 16 else 1
    block_k = min(128, max(16, triton.next_power_of_2(triton.cdiv(columns, splits * groups))))
    block_r = 16 if width == 16 else _block_r(ranks)
    lora_shrink_kernel[(count, splits, triton.cdiv(ranks, block_r))](
        x, down, partial, tiles.adapters, tiles.rows, columns, x.stride(0), ranks, BLOCK_M=width, BLOCK_R=block_r,
        GROUPS=groups, BLOCK_K=block_k, SPLITS=splits, PDL=PDL, num_warps=4, num_stages=1 if width == 16 else 3,
        launch_pdl=PDL,
    )  # fmt: skip
    return partial


def lora_expand_add(
    partial: Tensor, up: Tensor, offsets: Tensor, out_features: Sequence[int], tiles: LoraTiles, y: Tensor
) -> None:
    """Multiply what `lora_shrink` returns with up [adapters, out, rank] and add it to y [tokens, out] in place.

    Layer i has out_features[i] columns of y, from offsets[i] to offsets[i + 1], and ranks i * rank to (i + 1) * rank.
    """
    max_columns, align = max(out_features), math.gcd(16, *out_features)
    (_, ranks, splits), (_, columns, rank), (count, width) = partial.shape, up.shape, tiles.rows.shape
    block_n = min(128, max(16, triton.next_power_of_2(max_columns)))
    lora_expand_kernel[(triton.cdiv(max_columns, block_n), count, len(offsets) - 1)](
        partial, up, y, offsets, tiles.adapters, tiles.rows, columns, rank, ranks, BLOCK_M=width, BLOCK_N=block_n,
        BLOCK_R=_block_r(rank), SPLITS=splits, ALIGN=align, PDL=PDL, num_warps=4, num_stages=1, launch_pdl=PDL,
    )  # fmt: skip


def num_splits(tokens: int, columns: int) -> int:
    """Return over how many programs the columns of a token are split, a power of two: fewer with many tokens, which
    occupy the GPU by themselves."""
    most = 1 if tokens > 2048 else 4 if tokens > MANY_TOKENS else 8
    return min(most if columns <= 8192 else 2 * most, triton.next_power_of_2(triton.cdiv(columns, 256)))


def _block_r(ranks: int) -> int:
    return min(MAX_BLOCK_R, max(16, triton.next_power_of_2(ranks)))
