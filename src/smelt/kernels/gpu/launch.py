"""Kernel selection, tile sizes and launches of products. Thresholds and tiles were tuned on an H200."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.gpu.activations import quantize_rows_kernel
from smelt.kernels.gpu.arch import PDL, PTX
from smelt.kernels.gpu.dequantize_kernel import dequantize_kernel
from smelt.kernels.gpu.gemm import gemm_kernel, reduce_splits_kernel
from smelt.kernels.gpu.gemv import gemv_kernel
from smelt.kernels.gpu.matrix import Matrix

GEMV_BATCH = 2  # largest batch that runs as GEMVs
GEMM_BATCH = 64  # largest batch with codes dequantized in registers; beyond, the matrix is dequantized first
INT8_BATCH = 1024  # the same for int8 inputs, where the matrix is dequantized to int8


def weight_only_path(batch: int, matrix: Matrix) -> str:
    """Return `gemv`, `gemm` or `expand` (dequantize first)."""
    if batch <= GEMV_BATCH and gemv_chunk_size(matrix) is not None:
        return "gemv"
    supported = matrix.element != "dint" and gemm_block_k(matrix, 16) is not None
    return "gemm" if batch <= GEMM_BATCH and supported else "expand"


def weight_only(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """Multiply x [batch, columns] in half precision -> [batch, rows] in its dtype."""
    if x.shape[0] == 0 or matrix.rows == 0:
        return x.new_empty(x.shape[0], matrix.rows)
    if x.stride(1) != 1:
        x = x.contiguous()
    path = weight_only_path(x.shape[0], matrix)
    if path == "gemv":
        return gemv(x, matrix, bias)
    if path == "gemm":
        return gemm(x, matrix, bias, None, x.dtype)
    return F.linear(x, dequantize(matrix, x.dtype), bias)


def eight_bit_path(batch: int, matrix: Matrix) -> str:
    """Return `scaled_mm` (PyTorch's), `gemm`, or `expand` (dequantize to int8 first)."""
    if matrix.element == "table":
        return "scaled_mm"
    return "expand" if batch > INT8_BATCH and matrix.bits < 8 else "gemm"


def eight_bit(
    x: Tensor,
    matrix: Matrix,
    bias: Tensor | None,
    *,
    static_scale: Tensor | None,
    clip_ratio: float,
    amax_code: float,
    x_scale_dtype: str,
) -> Tensor:
    """Quantize x [batch, columns] to int8 or E4M3 and multiply -> [batch, rows] in the dtype of x."""
    if x.shape[0] == 0 or matrix.rows == 0:
        return x.new_empty(x.shape[0], matrix.rows)
    if x.stride(1) != 1:
        x = x.contiguous()
    path = eight_bit_path(x.shape[0], matrix)
    if path == "scaled_mm":
        codes, scales = quantize_rows(x, torch.float8_e4m3fn, amax_code, x_scale_dtype, static_scale, clip_ratio)
        weight_scale = matrix.scale.float().reshape(1, -1).expand(1, matrix.rows).contiguous()
        weight = matrix.codes.view(torch.float8_e4m3fn).t()
        y = torch._scaled_mm(codes, weight, scales[:, None], weight_scale, out_dtype=x.dtype, use_fast_accum=True)
        return y if bias is None else y + bias
    codes, scales = quantize_rows(x, torch.int8, amax_code, x_scale_dtype, static_scale, clip_ratio)
    return int8_product(codes, scales, matrix, bias, x.dtype)


def int8_product(codes_x: Tensor, scales: Tensor, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply int8 [batch, columns] with per-row scales -> [batch, rows]."""
    if eight_bit_path(codes_x.shape[0], matrix) == "expand":
        codes = dequantize(matrix, torch.uint8)
        matrix = replace(matrix, codes=codes, bits=8, zero=None, default_zero=128)
    return gemm(codes_x, matrix, bias, scales, dtype)


def gemv_chunk_size(matrix: Matrix) -> int | None:
    """Return how many codes of a row a GEMV thread reads at once; None if the GEMV does not support the matrix."""
    if matrix.element not in ("int", "e2m1") or matrix.octets % 4 or matrix.codes.data_ptr() % 16:
        return None
    for size in (16,) if matrix.bits == 8 else (32, 16) if matrix.bits == 4 else (32,):
        if matrix.columns % size == 0 and matrix.group_size % size == 0:
            return size
    return None


def gemv_config(matrix: Matrix) -> tuple[int, int, int]:
    """Return rows, chunks and warps."""
    if not uses_integer_gemv(matrix):
        return (8, 128, 4) if matrix.negative is not None or matrix.group_size == 16 else (4, 64, 2)
    return (8, 32, 1) if matrix.bits == 4 and matrix.rows >= 8192 else (8, 128, 4)


def uses_integer_gemv(matrix: Matrix) -> bool:
    """Return whether the GEMV multiplies integers; otherwise floats."""
    return matrix.element == "int" and 32 % matrix.bits == 0


def gemv(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    size = gemv_chunk_size(matrix)
    assert size is not None
    rows, chunks, warps = gemv_config(matrix)
    y = x.new_empty(x.shape[0], matrix.rows)
    words = matrix.codes.view(torch.int32)
    gemv_kernel[(triton.cdiv(matrix.rows, rows) * x.shape[0],)](
        x, words, matrix.scale, matrix.zero, matrix.negative, matrix.tensor, bias, y, x.shape[0], matrix.rows,
        matrix.columns, x.stride(0), words.shape[1], matrix.scale_stride, BITS=matrix.bits, ELEMENT=matrix.element,
        SCALE_DTYPE=matrix.scale_dtype, DEFAULT_ZERO=matrix.default_zero, GROUP_SIZE=matrix.group_size,
        CHUNK_SIZE=size, BLOCK_N=rows, BLOCK_CHUNKS=chunks, PTX=PTX, PDL=PDL, num_warps=warps, launch_pdl=PDL,
        maxnreg=128 if uses_integer_gemv(matrix) else None,
    )  # fmt: skip
    return y


def gemm_block_k(matrix: Matrix, min_k: int) -> int | None:
    """Return columns per GEMM tile: within one group, or a multiple of the group size. `min_k` is the smallest K of a
    tensor core instruction. None if the GEMM does not support the matrix."""
    planes = 8 // matrix.bits if matrix.bits in (2, 4, 8) else 0
    if not planes or matrix.element not in ("int", "dint", "e2m1", "e4m3") or matrix.table is not None:
        return None
    exact = matrix.element == "e2m1" and matrix.scale_dtype != "float"
    if matrix.group_size == 0 or (exact and 128 % matrix.group_size == 0):
        return 128
    tile = min(matrix.group_size & -matrix.group_size, 128)
    return tile if tile >= min_k * planes else None


def gemm(
    x: Tensor, matrix: Matrix, bias: Tensor | None, x_scale: Tensor | None, dtype: torch.dtype, *,
    tiles: tuple[int, int, int, int] | None = None, split: int | None = None,
) -> Tensor:  # fmt: skip
    """Multiply x [batch, columns], float or int8 with per-row scales. `tiles`: rows, vectors, warps, stages."""
    batch, rows = x.shape[0], matrix.rows
    columns = gemm_block_k(matrix, 32 if x.dtype == torch.int8 else 16)
    assert columns is not None
    tile_rows, tile_batch, warps, stages = tiles or gemm_config(batch, matrix, x.dtype == torch.int8)
    grid = triton.cdiv(rows, tile_rows), triton.cdiv(batch, tile_batch)
    steps = triton.cdiv(matrix.columns, columns)
    split = split or num_k_splits(grid[0] * grid[1], steps, 256 if batch <= 32 else 128)
    tiles_per_split = triton.cdiv(steps, split)
    split = triton.cdiv(steps, tiles_per_split)
    y = torch.empty(batch, rows, dtype=dtype, device=x.device)
    target = y if split == 1 else torch.empty(split, batch, rows, dtype=torch.float32, device=x.device)
    gemm_kernel[(*grid, split)](
        x, matrix.codes, matrix.scale, matrix.zero, matrix.negative, matrix.tensor, x_scale, bias, target, None, None,
        batch, rows, matrix.columns, x.stride(0), matrix.octets, matrix.scale_stride, tiles_per_split, BITS=matrix.bits,
        ELEMENT=matrix.element, SCALE_DTYPE=matrix.scale_dtype, DEFAULT_ZERO=matrix.default_zero,
        GROUP_SIZE=matrix.group_size, BLOCK_N=tile_rows, BLOCK_M=tile_batch,
        BLOCK_K=columns, SPLIT_K=split > 1, SHARED_X=False, PTX=PTX, PDL=PDL,
        num_warps=warps, num_stages=stages,
        launch_pdl=PDL,
    )  # fmt: skip
    if split > 1:
        size = 1024 if y.numel() > 1 << 17 else 256
        reduce_splits_kernel[(triton.cdiv(y.numel(), size),)](
            target, bias, y, y.numel(), rows, SPLIT_K=split, BLOCK=size, PDL=PDL, num_warps=size // 256, launch_pdl=PDL
        )
    return y


def gemm_config(batch: int, matrix: Matrix, integer: bool) -> tuple[int, int, int, int]:
    """Return rows, vectors, warps and stages; `integer`: x is int8."""
    if batch <= 16:
        return (128, 16, 4, 3) if matrix.element == "int" and matrix.bits < 8 and not integer else (64, 16, 4, 4)
    if batch <= 32:
        return 128, 32, 4, 3
    return (128, 64, 8, 4) if batch <= 512 else (128, 128, 8, 4)


def num_k_splits(programs: int, steps: int, min_programs: int) -> int:
    """Return the number of splits of the columns (split-K) that yields enough programs."""
    splits = 1
    while programs * splits < min_programs and splits < 8 and steps >= 8 * splits:
        splits *= 2
    return splits


def dequantize(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Dequantize the matrix [rows, columns] to a dtype; for uint8, integers plus 128, without scales."""
    out = torch.empty(matrix.rows, matrix.columns, dtype=dtype, device=matrix.codes.device)
    if out.numel():
        dequantize_kernel[(triton.cdiv(matrix.rows, 4), triton.cdiv(matrix.columns, 1024))](
            matrix.codes, matrix.scale, matrix.zero, matrix.negative, matrix.tensor, matrix.table, out, matrix.rows,
            matrix.columns, matrix.octets, matrix.scale_stride, BITS=matrix.bits, ELEMENT=matrix.element,
            SCALE_DTYPE=matrix.scale_dtype, DEFAULT_ZERO=matrix.default_zero, GROUP_SIZE=matrix.group_size,
            BLOCK_M=4, BLOCK_N=1024,
        )  # fmt: skip
    return out


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype,
    amax_code: float,
    x_scale_dtype: str,
    static_scale: Tensor | None = None,
    clip_ratio: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Quantize x [batch, columns] to int8 or E4M3 codes of that shape, with per-row scales in float32."""
    batch, columns = x.shape
    codes = torch.empty(batch, columns, dtype=dtype, device=x.device)
    scales = torch.empty(batch, dtype=torch.float32, device=x.device)
    if batch:
        tile = max(min(triton.next_power_of_2(columns), 16384), 16)
        quantize_rows_kernel[(batch,)](
            x, static_scale, codes, scales, columns, x.stride(0), clip_ratio, AMAX_CODE=amax_code,
            SCALE_DTYPE=x_scale_dtype, BLOCK_N=tile, SINGLE_TILE=tile >= columns, PDL=PDL,
            num_warps=max(min(tile // 512, 16), 1), launch_pdl=PDL,
        )  # fmt: skip
    return codes, scales
