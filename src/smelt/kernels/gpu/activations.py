"""Quantize activations to int8 or E4M3 with per-row scales, as `numerics` does: in a kernel of its own, or fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True)
class RowQuant:
    """How rows of activations are quantized; their scales have this dtype, and are kept in float32."""

    dtype: torch.dtype  # int8 or float8_e4m3fn
    amax_code: float  # the largest magnitude of a row, times clip_ratio, maps to this
    scale_dtype: str
    static_scale: Tensor | None = None
    clip_ratio: float = 1.0


@dataclass(frozen=True)
class QuantizedRows:
    """Codes [rows, columns] and scales [rows] of activations of a dtype."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def empty(cls, like: Tensor, columns: int, quant: RowQuant) -> QuantizedRows:
        codes = torch.empty(len(like), columns, dtype=quant.dtype, device=like.device)
        return cls(codes, torch.empty(len(like), dtype=torch.float32, device=like.device), like.dtype)


@triton.jit
def round_scale(value, SCALE_DTYPE: tl.constexpr):
    """Round a scale to its stored dtype."""
    if SCALE_DTYPE == "float16":
        stored = tl.maximum(tl.minimum(value, 65504.0).to(tl.float16).to(tl.float32), 5.9604644775390625e-08)
    elif SCALE_DTYPE == "bfloat16":
        stored = tl.maximum(tl.minimum(value, 3.38e38).to(tl.bfloat16).to(tl.float32), 1.1754943508222875e-38)
    else:
        stored = tl.maximum(tl.minimum(value, 3.4e38), 1.1754943508222875e-38)
    return stored


@triton.jit
def finite_abs(value):
    """Return the magnitude; 0 for infinities."""
    abs_value = tl.abs(value)
    return tl.where(abs_value < float("inf"), abs_value, 0.0)


@triton.jit
def quantize(value, scale, DTYPE: tl.constexpr):
    steps = tl.div_rn(value, tl.zeros(value.shape, tl.float32) + scale)
    steps = tl.where(steps == steps, steps, 0.0)
    if DTYPE == tl.int8:  # noqa: SIM300
        steps = tl.minimum(tl.maximum(steps, -128.0), 127.0)
        steps = (steps + 12582912.0) - 12582912.0  # round to nearest, ties to even
    else:
        steps = tl.minimum(tl.maximum(steps, -448.0), 448.0)
    return steps.to(DTYPE)


@triton.jit
def scale_of(amax, has_nan, static_scale, clip_ratio, AMAX_CODE: tl.constexpr, SCALE_DTYPE: tl.constexpr):
    """Return the scale of a row, and what is stored of it: NaN if the row has a NaN."""
    if static_scale is not None:
        scale = tl.load(static_scale).to(tl.float32)
    else:
        scale = tl.where(
            amax == 0.0, 1.0, round_scale(tl.div_rn(amax * clip_ratio, tl.full([], AMAX_CODE, tl.float32)), SCALE_DTYPE)
        )
    return scale, tl.where(has_nan, float("nan"), scale)


@triton.jit
def store_quantized(
    value, inside, codes, scales, row, width, lane, static_scale, clip_ratio, AMAX_CODE: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Quantize and store a whole row that is in registers; lanes outside of it are 0."""
    has_nan = tl.max((value != value).to(tl.int32), axis=0) > 0
    amax = tl.max(finite_abs(value), axis=0)
    scale, stored = scale_of(amax, has_nan, static_scale, clip_ratio, AMAX_CODE, SCALE_DTYPE)
    tl.store(scales + row, stored)
    tl.store(codes + row * width + lane, quantize(value, scale, codes.dtype.element_ty), mask=inside)


@triton.jit
def quantize_rows_kernel(
    x, static_scale, codes, scales, columns, x_stride, clip_ratio, AMAX_CODE: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, SINGLE_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantize one row per program. The largest magnitude times `clip_ratio` maps to AMAX_CODE, unless there is a
    `static_scale`. Infinities do not count for the scale, and a NaN makes its row NaN. SINGLE_TILE: the row fits into
    one tile of BLOCK_N and is read only once."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    start_x, start_codes = x + row * x_stride + lane, codes + row * columns + lane
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(start_x, mask=lane < columns, other=0.0).to(tl.float32)
    magnitudes = finite_abs(value)
    nan_flags = (value != value).to(tl.int32)
    if not SINGLE_TILE:
        for start in range(BLOCK_N, columns, BLOCK_N):
            next_value = tl.load(start_x + start, mask=start + lane < columns, other=0.0).to(tl.float32)
            magnitudes = tl.maximum(magnitudes, finite_abs(next_value))
            nan_flags |= (next_value != next_value).to(tl.int32)
    has_nan = tl.max(nan_flags, axis=0) > 0
    scale, stored = scale_of(tl.max(magnitudes, axis=0), has_nan, static_scale, clip_ratio, AMAX_CODE, SCALE_DTYPE)
    tl.store(scales + row, stored)
    tl.store(start_codes, quantize(value, scale, codes.dtype.element_ty), mask=lane < columns)
    if not SINGLE_TILE:
        for start in range(BLOCK_N, columns, BLOCK_N):
            inside = start + lane < columns
            next_value = tl.load(start_x + start, mask=inside, other=0.0).to(tl.float32)
            tl.store(start_codes + start, quantize(next_value, scale, codes.dtype.element_ty), mask=inside)
