"""GEMV with an unquantized matrix, fused with the operations around it in a decoder layer.

Decoding one token reads every weight once and does little else, so launch overhead matters. The RMSNorm of the input,
the gate of the feed-forward and the residual addition are fused into the GEMV, which starts to read the matrix before
the previous kernel has ended (programmatic dependent launch).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gpu.arch import PDL


@triton.jit
def load_tile(matrix, row, column, columns, row_mask):  # type: ignore[no-untyped-def]
    """Load a tile [BLOCK_N, BLOCK_K]."""
    inside = row_mask[:, None] & (column < columns)[None, :]
    address = matrix + row.to(tl.int64)[:, None] * columns + column[None, :]
    return tl.load(address, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def fused_gemv_kernel(  # type: ignore[no-untyped-def]
    x, norm, matrix, bias, y, rows, columns, epsilon, GATED: tl.constexpr, ADD_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y = matrix @ x, BLOCK_N rows per program. `norm`: apply RMSNorm to x first; GATED: the matrix has `rows`
    rows of the gate projection, then `rows` of the up projection; ADD_RESIDUAL: accumulate into y."""
    row, lane = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row_mask = row < rows
    tile = load_tile(matrix, row, lane, columns, row_mask)
    if GATED:
        up_tile = load_tile(matrix, row + rows, lane, columns, row_mask)
    if PDL:  # x and y, read from here on, are written by earlier kernels
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32) if GATED else acc
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, columns, BLOCK_K):
        column = start + lane
        current = tile
        tile = load_tile(matrix, row, column + BLOCK_K, columns, row_mask)
        if GATED:
            current_up = up_tile
            up_tile = load_tile(matrix, row + rows, column + BLOCK_K, columns, row_mask)
        value = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
        if norm is not None:
            squares += value * value
            value *= tl.load(norm + column, mask=column < columns, other=0.0).to(tl.float32)
        acc += current.to(tl.float32) * value[None, :]
        if GATED:
            up_acc += current_up.to(tl.float32) * value[None, :]
    inv_rms = 1.0 if norm is None else tl.rsqrt(tl.sum(squares, axis=0) / columns + epsilon)
    result = tl.sum(acc, axis=1) * inv_rms
    if bias is not None:
        result += tl.load(bias + row, mask=row_mask, other=0.0).to(tl.float32)
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * (tl.sum(up_acc, axis=1) * inv_rms)
    if ADD_RESIDUAL:
        result += tl.load(y + row, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(y + row, result.to(y.dtype.element_ty), mask=row_mask)


def fused_gemv(
    x: Tensor, matrix: Tensor, bias: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 0.0,
    gated: bool = False, residual: Tensor | None = None, tiles: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Multiply x [1, columns] with the matrix [rows, columns] -> [1, rows], or [1, rows / 2] if gated. `norm`: RMSNorm
    weight; `residual`: updated in place. `tiles`: rows, columns, warps."""
    rows, columns = matrix.shape[0] // (2 if gated else 1), matrix.shape[1]
    y = torch.empty(1, rows, dtype=x.dtype, device=x.device) if residual is None else residual
    tile_rows, tile_columns, warps = tiles or gemv_config(rows, norm is not None, gated)
    fused_gemv_kernel[(triton.cdiv(rows, tile_rows),)](
        x, norm, matrix, bias, y, rows, columns, epsilon, GATED=gated, ADD_RESIDUAL=residual is not None,
        BLOCK_N=tile_rows, BLOCK_K=min(tile_columns, triton.next_power_of_2(columns)), PDL=PDL,
        num_warps=warps, launch_pdl=PDL,
    )  # fmt: skip
    return y


def gemv_config(rows: int, normed: bool, gated: bool) -> tuple[int, int, int]:
    """Return rows, columns and warps, the fastest on an H200 (benchmarks/serve/gpu_engine_kernels.py)."""
    if rows >= 2**15:
        return 16, 256, 4
    if gated:
        return 2, 512, 4
    return (4, 512, 4) if normed else (4, 1024, 4)
