"""The product of one vector with a matrix that is not packed, with what comes before and after it in a decoder.

One token reads every weight once and does little else, so each launch in between shows. The norm of the input, the gate
of a feed-forward and the addition to the hidden states are computed by the product's own programs; they begin to read
the matrix before the kernel ahead of them has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gpu.arch import PDL


@triton.jit
def load_tile(matrix, row, column, columns, held):  # type: ignore[no-untyped-def]
    """[ROWS, COLUMNS]"""
    inside = held[:, None] & (column < columns)[None, :]
    place = matrix + row.to(tl.int64)[:, None] * columns + column[None, :]
    return tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def vector_kernel(  # type: ignore[no-untyped-def]
    x, norm, matrix, bias, y, rows, columns, epsilon, GATED: tl.constexpr, ADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = matrix @ x, for ROWS rows a program. With `norm`, x is normed first; GATED: the matrix has `rows` rows of the
    gate and then `rows` of what it lets through; ADDED: y is added to."""
    row, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    held = row < rows
    tile = load_tile(matrix, row, lane, columns, held)
    if GATED:
        through = load_tile(matrix, row + rows, lane, columns, held)
    if PDL:  # what the kernels before this one wrote is read from here on: x and y
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    let_through = tl.zeros([ROWS, COLUMNS], tl.float32) if GATED else sums
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + lane
        now = tile
        tile = load_tile(matrix, row, column + COLUMNS, columns, held)
        if GATED:
            now_through = through
            through = load_tile(matrix, row + rows, column + COLUMNS, columns, held)
        value = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
        if norm is not None:
            squares += value * value
            value *= tl.load(norm + column, mask=column < columns, other=0.0).to(tl.float32)
        sums += now.to(tl.float32) * value[None, :]
        if GATED:
            let_through += now_through.to(tl.float32) * value[None, :]
    over = 1.0 if norm is None else tl.rsqrt(tl.sum(squares, axis=0) / columns + epsilon)
    found = tl.sum(sums, axis=1) * over
    if bias is not None:
        found += tl.load(bias + row, mask=held, other=0.0).to(tl.float32)
    if GATED:
        found = found / (1.0 + tl.exp(-found)) * (tl.sum(let_through, axis=1) * over)
    if ADDED:
        found += tl.load(y + row, mask=held, other=0.0).to(tl.float32)
    tl.store(y + row, found.to(y.dtype.element_ty), mask=held)


def fused_gemv(
    x: Tensor, matrix: Tensor, bias: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 0.0,
    gated: bool = False, added: Tensor | None = None, tiles: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """x [1, columns] with the matrix [rows, columns] -> [1, rows]; half as many rows when gated. `norm` is the weight
    of a root-mean-square norm; `added` is added to, in place. `tiles`: rows, columns, warps."""
    rows, columns = matrix.shape[0] // (2 if gated else 1), matrix.shape[1]
    y = torch.empty(1, rows, dtype=x.dtype, device=x.device) if added is None else added
    tile_rows, tile_columns, warps = tiles or tiles_for(rows, norm is not None, gated)
    vector_kernel[(triton.cdiv(rows, tile_rows),)](
        x, norm, matrix, bias, y, rows, columns, epsilon, GATED=gated, ADDED=added is not None, ROWS=tile_rows,
        COLUMNS=min(tile_columns, triton.next_power_of_2(columns)), PDL=PDL, num_warps=warps, launch_pdl=PDL,
    )  # fmt: skip
    return y


def tiles_for(rows: int, normed: bool, gated: bool) -> tuple[int, int, int]:
    """Rows, columns, warps: what was fastest on an H200 (benchmarks/serve/gpu_parts.py)."""
    if rows >= 2**15:
        return 16, 256, 4
    if gated:
        return 2, 512, 4
    return (4, 512, 4) if normed else (4, 1024, 4)
