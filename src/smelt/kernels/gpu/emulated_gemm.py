"""Matrix products with an emulated accumulator in Triton: one tile of the output per program, one step at a time.

Bit-identical to the reference in `smelt.kernels.emulated_gemm`. Tensor cores cannot round after every addition, so that
products are elementwise: an emulation, orders of magnitude slower than a GEMM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smelt.kernels.accumulation import Accumulation

TILE = 32, 64  # rows and columns of a program
WARPS = 8


@triton.jit
def sum_to_odd(x, y):  # type: ignore[no-untyped-def]
    """Add float64, rounding to odd. See the reference."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    bits = total.to(tl.int64, bitcast=True)
    outward = tl.where((error > 0) == (total > 0), 1, -1).to(tl.int64)
    move = ((error > 0) | (error < 0)) & ((bits & 1) == 0)
    return tl.where(move, bits + outward, bits).to(tl.float64, bitcast=True)


@triton.jit
def add(  # type: ignore[no-untyped-def]
    x, y, row, column, step, seed, max_value, min_positive, overflow, infinite, MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr, SUBNORMALS: tl.constexpr, ROUNDING: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Add and round to the accumulator's format. The formulas are those of `kernels/cpu/source/emulated_gemm.cpp`:
    adding 2^MANTISSA steps to a magnitude and subtracting them again rounds it to a multiple of the step."""
    if FLOAT32:
        value = x + y
        magnitude = tl.abs(value)
        bits = magnitude.to(tl.int32, bitcast=True)
        sign = value.to(tl.int32, bitcast=True) ^ bits
        code = tl.maximum(bits >> 23, MIN_EXPONENT + 127)
        steps = ((code + (23 - MANTISSA_BITS)) << 23).to(tl.float32, bitcast=True)
        result = (magnitude + steps) - steps
    else:
        value = sum_to_odd(x, y)
        magnitude = tl.abs(value)
        bits = magnitude.to(tl.int64, bitcast=True)
        sign = value.to(tl.int64, bitcast=True) ^ bits
        code = tl.maximum(bits >> 52, MIN_EXPONENT + 1023)
        steps = ((code + (52 - MANTISSA_BITS)) << 52).to(tl.float64, bitcast=True)
        result = (magnitude + steps) - steps
        if ROUNDING != "nearest":
            step_size = ((code - MANTISSA_BITS) << 52).to(tl.float64, bitcast=True)
            result = tl.where(result > magnitude, result - step_size, result)
        if ROUNDING == "stochastic":
            zero = row * 0 + column * 0
            word, _, _, _ = tl.philox(seed, zero + step, zero + row, zero + column, zero)
            uniform = word.to(tl.float64) * (1.0 / 4294967296.0)
            up = uniform < (magnitude - result) / step_size
            result = tl.where(up, result + step_size, result)
    if not SUBNORMALS:
        if ROUNDING == "nearest":
            tiny = tl.where(magnitude > 0.5 * min_positive, min_positive, 0.0)
        elif ROUNDING == "stochastic":
            tiny = tl.where(magnitude > uniform * min_positive, min_positive, 0.0)
        else:
            tiny = magnitude * 0.0
        result = tl.where(magnitude < min_positive, tiny, result)
    result = tl.where(result > max_value, overflow, result)
    result = tl.where(magnitude == float("inf"), infinite, result)
    result = tl.where(value == value, result, value)
    return (result.to(sign.dtype, bitcast=True) | sign).to(value.dtype, bitcast=True)


@triton.jit(do_not_specialize=["seed"])  # changes from call to call
def emulated_gemm_kernel(  # type: ignore[no-untyped-def]
    a, b, out, limits, rows, columns, length, chunk_size, seed, MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr, SUBNORMALS: tl.constexpr, ROUNDING: tl.constexpr, FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    a_step, b_step = a + row.to(tl.int64) * length, b + column
    max_value, min_positive = tl.load(limits), tl.load(limits + 1)
    overflow, infinite = tl.load(limits + 2), tl.load(limits + 3)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if FLOAT32 else tl.float64)
    for start in range(0, length, chunk_size):
        partial = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if FLOAT32 else tl.float64)
        for step in range(start, tl.minimum(start + chunk_size, length)):
            x = tl.load(a_step, mask=row < rows, other=0.0).to(total.dtype)
            y = tl.load(b_step, mask=column < columns, other=0.0).to(total.dtype)
            partial = add(
                partial, x * y, row, column, step, seed, max_value, min_positive, overflow, infinite, MANTISSA_BITS,
                MIN_EXPONENT, SUBNORMALS, ROUNDING, FLOAT32,
            )  # fmt: skip
            a_step += 1
            b_step += columns
        total = add(
            total, partial, row, column, length + start // chunk_size, seed, max_value, min_positive, overflow,
            infinite, MANTISSA_BITS, MIN_EXPONENT, SUBNORMALS, ROUNDING, FLOAT32,
        )  # fmt: skip
    inside = (row < rows) & (column < columns)
    tl.store(out + row.to(tl.int64) * columns + column, total.to(tl.float32), mask=inside)


def emulated_matmul(
    a: Tensor, b: Tensor, accumulation: Accumulation, *, tile: tuple[int, int] = TILE, num_warps: int = WARPS
) -> Tensor:
    """Multiply a [rows, length] by b [length, columns], both float32, with the contract of the reference."""
    a, b = a.contiguous(), b.contiguous()
    (rows, length), columns = a.shape, b.shape[1]
    out, number_format = torch.zeros(rows, columns, device=a.device), accumulation.format
    if not out.numel():
        return out
    dtype = torch.float32 if accumulation.float32_is_exact else torch.float64
    limits = torch.tensor(
        [number_format.max_value, number_format.min_positive, accumulation.overflow, accumulation.infinite],
        dtype=dtype,
    ).to(a.device, non_blocking=True)
    emulated_gemm_kernel[triton.cdiv(rows, tile[0]), triton.cdiv(columns, tile[1])](
        a, b, out, limits, rows, columns, length, accumulation.chunk_size, accumulation.seed,
        MANTISSA_BITS=number_format.mantissa_bits, MIN_EXPONENT=number_format.min_exponent,
        SUBNORMALS=number_format.subnormals, ROUNDING=accumulation.rounding, FLOAT32=accumulation.float32_is_exact,
        BLOCK_M=tile[0], BLOCK_N=tile[1], num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out
