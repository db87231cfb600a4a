"""Matrix products with an emulated accumulator in Triton: one tile of the output per program, one step at a time.

Bit-identical to the reference in `smelt.kernels.emulated_gemm`. Tensor cores cannot round after every addition, so that
products are elementwise: an emulation, orders of magnitude slower than a GEMM. Additions within a chunk are sequential,
chunks are not: where a product has too few elements to fill the GPU, as a weight gradient has, programs share out the
chunks, and a second kernel adds their sums in order.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from smelt.kernels.accumulation import Accumulation
from smelt.numerics.float_format import FloatFormat

_WORKSPACE = 1 << 26  # elements of the sums of chunks, at most
_MAX_GRID_Z = 65535


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
    """Add and round to the accumulator's format."""
    if FLOAT32:
        value = x + y
    else:
        value = sum_to_odd(x, y)
    return round_value(
        value, row, column, step, seed, max_value, min_positive, overflow, infinite, MANTISSA_BITS, MIN_EXPONENT,
        SUBNORMALS, ROUNDING, FLOAT32,
    )  # fmt: skip


@triton.jit
def round_value(  # type: ignore[no-untyped-def]
    value, row, column, step, seed, max_value, min_positive, overflow, infinite, MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr, SUBNORMALS: tl.constexpr, ROUNDING: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Round to a format. The formulas are those of `kernels/cpu/source/emulated_gemm.cpp`: adding 2^MANTISSA steps to a
    magnitude and subtracting them again rounds it to a multiple of the step."""
    magnitude = tl.abs(value)
    if FLOAT32:
        bits = magnitude.to(tl.int32, bitcast=True)
        sign = value.to(tl.int32, bitcast=True) ^ bits
        code = tl.maximum(bits >> 23, MIN_EXPONENT + 127)
        steps = ((code + (23 - MANTISSA_BITS)) << 23).to(tl.float32, bitcast=True)
        result = (magnitude + steps) - steps
    else:
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
    a, b, out, limits, rows, columns, length, chunk_size, first_chunk, seed, MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr, SUBNORMALS: tl.constexpr, ROUNDING: tl.constexpr, FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiply a [length, rows] by b [length, columns]. With ONE_CHUNK a program adds up the products of one chunk, and
    `out` is [chunks, rows, columns]."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    max_value, min_positive = tl.load(limits), tl.load(limits + 1)
    overflow, infinite = tl.load(limits + 2), tl.load(limits + 3)
    a_step, b_step, begin, end = a + row, b + column, 0, length
    if ONE_CHUNK:
        begin = (first_chunk + tl.program_id(2)) * chunk_size
        end = tl.minimum(begin + chunk_size, length)
        a_step += begin.to(tl.int64) * rows
        b_step += begin.to(tl.int64) * columns
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if FLOAT32 else tl.float64)
    x = tl.load(a_step, mask=row < rows, other=0.0)
    y = tl.load(b_step, mask=column < columns, other=0.0)
    for start in range(begin, end, chunk_size):
        partial = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if FLOAT32 else tl.float64)
        for step in range(start, tl.minimum(start + chunk_size, end)):
            a_step += rows
            b_step += columns
            # Before the additions, which wait for each other: so that they do not wait for memory too.
            next_x = tl.load(a_step, mask=(row < rows) & (row * 0 + step + 1 < end), other=0.0)
            next_y = tl.load(b_step, mask=(column < columns) & (column * 0 + step + 1 < end), other=0.0)
            partial = add(
                partial, x.to(total.dtype) * y.to(total.dtype), row, column, step, seed, max_value, min_positive,
                overflow, infinite, MANTISSA_BITS, MIN_EXPONENT, SUBNORMALS, ROUNDING, FLOAT32,
            )  # fmt: skip
            x, y = next_x, next_y
        if ONE_CHUNK:
            total = partial
        else:
            total = add(
                total, partial, row, column, length + start // chunk_size, seed, max_value, min_positive, overflow,
                infinite, MANTISSA_BITS, MIN_EXPONENT, SUBNORMALS, ROUNDING, FLOAT32,
            )  # fmt: skip
    if ONE_CHUNK:
        out += tl.program_id(2).to(tl.int64) * rows * columns
    inside = (row < rows) & (column < columns)
    tl.store(out + row.to(tl.int64) * columns + column, total.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def sum_chunks_kernel(  # type: ignore[no-untyped-def]
    sums, out, limits, outputs, columns, length, chunks, first_chunk, seed, MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr, SUBNORMALS: tl.constexpr, ROUNDING: tl.constexpr, FLOAT32: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add sums of chunks [chunks, rows * columns] to out [rows * columns], one after the other."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = (element // columns).to(tl.int32), (element % columns).to(tl.int32)
    max_value, min_positive = tl.load(limits), tl.load(limits + 1)
    overflow, infinite = tl.load(limits + 2), tl.load(limits + 3)
    inside = element < outputs
    total = tl.load(out + element, mask=inside, other=0.0).to(tl.float32 if FLOAT32 else tl.float64)
    partial = tl.load(sums + element, mask=inside, other=0.0)
    for chunk in range(0, chunks):
        sums += outputs
        following = tl.load(sums + element, mask=inside & (row * 0 + chunk + 1 < chunks), other=0.0)
        total = add(
            total, partial.to(total.dtype), row, column, length + first_chunk + chunk, seed, max_value, min_positive,
            overflow, infinite, MANTISSA_BITS, MIN_EXPONENT, SUBNORMALS, ROUNDING, FLOAT32,
        )  # fmt: skip
        partial = following
    tl.store(out + element, total.to(tl.float32), mask=inside)


@triton.jit
def round_kernel(  # type: ignore[no-untyped-def]
    x, out, numel, max_value, min_positive, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr,
    SUBNORMALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round to nearest in float32, saturating."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, mask=index < numel, other=0.0)
    limit = 2 * max_value  # everything beyond saturates, and the exponent of the largest floats would overflow
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    value = round_value(
        value, index, index, 0, 0, max_value, min_positive, max_value, max_value, MANTISSA_BITS, MIN_EXPONENT,
        SUBNORMALS, "nearest", True,
    )  # fmt: skip
    tl.store(out + index, value, mask=index < numel)


def round_to(x: Tensor, number_format: FloatFormat) -> Tensor:
    """Round float32 values to nearest, saturating; `can_round` must be true of the format."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        round_kernel[(triton.cdiv(x.numel(), 1024),)](
            x, out, x.numel(), number_format.max_value, number_format.min_positive,
            MANTISSA_BITS=number_format.mantissa_bits, MIN_EXPONENT=number_format.min_exponent,
            SUBNORMALS=number_format.subnormals, BLOCK=1024, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def can_round(number_format: FloatFormat) -> bool:
    """Return whether the steps of a format, 2^23 of them included, are normal values of float32."""
    return number_format.min_exponent - number_format.mantissa_bits >= -126 and number_format.max_value < 2.0**80


@lru_cache(maxsize=64)
def _limits(accumulation: Accumulation, device: torch.device) -> Tensor:
    """Return the values of the format that are compared with, on the device."""
    number_format = accumulation.format
    dtype = torch.float32 if accumulation.float32_is_exact else torch.float64
    values = [number_format.max_value, number_format.min_positive, accumulation.overflow, accumulation.infinite]
    return torch.tensor(values, dtype=dtype, device=device)


def tile_for(rows: int, columns: int, chunks: int, programs: int) -> tuple[int, int, int, bool]:
    """Return rows and columns of a tile, the warps of a program, and whether each program adds up a single chunk.

    programs: how many keep the GPU busy. A thread has 8 elements, whose additions overlap, or fewer if that leaves too
    few programs: then the time is that of one chain of additions.
    """
    outputs = rows * columns
    one_chunk = chunks > 1 and outputs < 2048 * programs
    parallel = outputs * chunks if one_chunk else outputs
    elements = next((size for size in (2048, 512) if parallel >= size * programs), 128)
    block_n = min(triton.next_power_of_2(columns), 64)
    block_m = min(triton.next_power_of_2(rows), max(elements // block_n, 1))
    per_thread = {2048: 8, 512: 4, 128: 1}[elements]
    return block_m, block_n, max(min(block_m * block_n // (32 * per_thread), 8), 1), one_chunk


def emulated_matmul(a: Tensor, b: Tensor, accumulation: Accumulation, *, programs: int | None = None) -> Tensor:
    """Multiply a [rows, length] by b [length, columns], both float32, with the contract of the reference."""
    a, b = a.t().contiguous(), b.contiguous()
    (length, rows), columns = a.shape, b.shape[1]
    out, number_format = torch.zeros(rows, columns, device=a.device), accumulation.format
    if not out.numel() or not length:
        return out
    if programs is None:
        programs = 2 * torch.cuda.get_device_properties(a.device).multi_processor_count
    chunk_size, limits = accumulation.chunk_size, _limits(accumulation, a.device)
    chunks = triton.cdiv(length, chunk_size)
    block_m, block_n, num_warps, one_chunk = tile_for(rows, columns, chunks, programs)
    tiles = triton.cdiv(rows, block_m), triton.cdiv(columns, block_n)
    constants = {
        "MANTISSA_BITS": number_format.mantissa_bits, "MIN_EXPONENT": number_format.min_exponent,
        "SUBNORMALS": number_format.subnormals, "ROUNDING": accumulation.rounding,
        "FLOAT32": accumulation.float32_is_exact, "enable_fp_fusion": False,
    }  # fmt: skip
    if not one_chunk:
        emulated_gemm_kernel[tiles](
            a, b, out, limits, rows, columns, length, chunk_size, 0, accumulation.seed, BLOCK_M=block_m,
            BLOCK_N=block_n, ONE_CHUNK=False, num_warps=num_warps, **constants,
        )  # fmt: skip
        return out
    at_once = max(min(_WORKSPACE // out.numel(), chunks, _MAX_GRID_Z), 1)
    sums = torch.empty(at_once, rows, columns, device=a.device)
    for first in range(0, chunks, at_once):
        count = min(at_once, chunks - first)
        emulated_gemm_kernel[(*tiles, count)](
            a, b, sums, limits, rows, columns, length, chunk_size, first, accumulation.seed, BLOCK_M=block_m,
            BLOCK_N=block_n, ONE_CHUNK=True, num_warps=num_warps, **constants,
        )  # fmt: skip
        sum_chunks_kernel[(triton.cdiv(out.numel(), 128),)](
            sums, out, limits, out.numel(), columns, length, count, first, accumulation.seed, BLOCK=128, num_warps=4,
            **constants,
        )  # fmt: skip
    return out
