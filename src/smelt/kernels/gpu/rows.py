"""Rows of KV pages in Triton: the key or value of one head, unquantized or as codes followed by their parameters.

`smelt.kernels.kv_quant` defines the layout. Codes are exact in any dtype that a network computes in, so that they are
multiplied directly and their scales applied outside the products: those of keys to scores, those of values to softmax
weights. Four constants describe a format: FORMAT; ROW_BYTES; HALF_DIM, the number of int4 codes in low nibbles; and
HADAMARD_STEPS, log2 of the order of the Hadamard matrix (0: none). Codes of int3 are eighths, their scales times eight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smelt.kernels import kv_quant as row_format
from smelt.kernels.gpu.codes import e4m3_codes, e4m3_numbers, e4m3_values, half_values, int3_values, int8_values
from smelt.kernels.kv_quant import KVQuantFormat

UNQUANTIZED, INT8, FP8, INT4, INT3 = (tl.constexpr(number) for number in range(5))
FORMATS = {row_format.INT8: 1, row_format.FP8: 2, row_format.INT4: 3, row_format.INT3: 4}
INT4_CLIP, INT3_CLIP = tl.constexpr(row_format.CLIP[row_format.INT4]), tl.constexpr(row_format.CLIP[row_format.INT3])
ROUND_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: floats of this size have no fraction


def kernel_constants(rows: KVQuantFormat | None) -> dict[str, int]:
    """Return the constants that describe a format to kernels."""
    if rows is None:
        return {"FORMAT": 0, "ROW_BYTES": 0, "HALF_DIM": 1, "HADAMARD_STEPS": 0}
    steps = rows.head_dim.bit_length() - 1 if rows.hadamard else 0
    return {
        "FORMAT": FORMATS[rows.name],
        "ROW_BYTES": rows.row_bytes,
        "HALF_DIM": rows.half_dim,
        "HADAMARD_STEPS": steps,
    }


def padded_head_dim(rows: KVQuantFormat | None, head_dim: int) -> int:
    """Return HEAD_DIM of kernels that store rows: a power of two, and a multiple of the group of int3 codes."""
    smallest = row_format.INT3_GROUP if rows is not None and rows.name == row_format.INT3 else 1
    return max(triton.next_power_of_2(head_dim), smallest)


def head_dim_of(rows: KVQuantFormat | None, last: int) -> int:
    """Return head_dim of pages whose last axis has this length."""
    return last if rows is None else rows.head_dim


@triton.jit
def scale_lift(FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the factor that enlarges value scales and sums: a weight times a scale could underflow in float16."""
    SCALE_LIFT: tl.constexpr = 128.0 if FORMAT == INT8 else 512.0 if FORMAT == FP8 else 16.0 if FORMAT == INT4 else 1.0
    return SCALE_LIFT


@triton.jit
def round_even(x):  # type: ignore[no-untyped-def]
    """Round to integers below 2^22, ties to even."""
    return (x + ROUND_MAGIC) - ROUND_MAGIC


@triton.jit
def divide_exact(x, divisor):  # type: ignore[no-untyped-def]
    """Divide with correct rounding, as the reference does."""
    return tl.div_rn(x, tl.zeros_like(x) + divisor)


@triton.jit
def interleave(x, FORMAT: tl.constexpr, HALF_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reorder [count, HEAD_DIM] as rows are read: the two codes of a byte side by side."""
    COUNT: tl.constexpr = x.shape[0]
    HEAD_DIM: tl.constexpr = x.shape[1]
    if FORMAT == INT4 and HEAD_DIM == 2 * HALF_DIM:
        x = tl.reshape(tl.permute(tl.reshape(x, [COUNT, 2, HALF_DIM]), [0, 2, 1]), [COUNT, HEAD_DIM])
    return x


@triton.jit
def deinterleave(x, FORMAT: tl.constexpr, HALF_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Undo `interleave`."""
    COUNT: tl.constexpr = x.shape[0]
    HEAD_DIM: tl.constexpr = x.shape[1]
    if FORMAT == INT4 and HEAD_DIM == 2 * HALF_DIM:
        x = tl.reshape(tl.permute(tl.reshape(x, [COUNT, HALF_DIM, 2]), [0, 2, 1]), [COUNT, HEAD_DIM])
    return x


@triton.jit
def load_kv_rows(  # type: ignore[no-untyped-def]
    pages, rows, in_range, lane, head_dim, DTYPE: tl.constexpr, FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr,
    HALF_DIM: tl.constexpr,
):  # fmt: skip
    """Load codes minus zero points [rows, HEAD_DIM] in a dtype for products, in the order of `interleave`, and their
    scales [rows]; unquantized pages have no scales."""
    COUNT: tl.constexpr = rows.shape[0]
    HEAD_DIM: tl.constexpr = lane.shape[0]
    inside = in_range[:, None] & (lane < head_dim)[None, :]
    if FORMAT == UNQUANTIZED:
        codes_less_zero = tl.load(pages + rows[:, None] * head_dim + lane[None, :], mask=inside, other=0.0)
        scales = in_range
    elif FORMAT == INT4:
        word = tl.load(
            (pages + rows * ROW_BYTES + (ROW_BYTES - 4)).to(tl.pointer_type(tl.int32)), mask=in_range, other=0
        )
        zeros = (word >> 16)[:, None]
        if HEAD_DIM == 2 * HALF_DIM:
            byte_index = tl.arange(0, HALF_DIM)[None, :]
            packed = tl.load(pages + rows[:, None] * ROW_BYTES + byte_index, mask=in_range[:, None], other=0)
            codes_less_zero = tl.reshape(tl.join(*half_values(packed, zeros, DTYPE)), [COUNT, HEAD_DIM])
        else:
            packed = tl.load(pages + rows[:, None] * ROW_BYTES + (lane % HALF_DIM)[None, :], mask=inside, other=0)
            codes = (packed.to(tl.int32) >> tl.where(lane < HALF_DIM, 0, 4)[None, :]) & 15
            codes_less_zero = (codes - zeros).to(tl.float32).to(DTYPE)
        scales = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == INT3:
        group = tl.arange(0, HEAD_DIM // 32)[None, :]
        words = (pages + rows * ROW_BYTES).to(tl.pointer_type(tl.int32))
        group_inside = in_range[:, None] & (32 * group < head_dim)
        first = tl.load(words[:, None] + 3 * group, mask=group_inside, other=0)
        second = tl.load(words[:, None] + 3 * group + 1, mask=group_inside, other=0)
        third = tl.load(words[:, None] + 3 * group + 2, mask=group_inside, other=0)
        word = tl.load(words + (ROW_BYTES // 4 - 1), mask=in_range, other=0)
        codes_less_zero = int3_values(first, second, third, (word >> 16)[:, None], DTYPE)
        scales = 8 * (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        packed = tl.load(pages + rows[:, None] * ROW_BYTES + lane[None, :], mask=inside, other=0)
        scales = tl.load(
            (pages + rows * ROW_BYTES + (ROW_BYTES - 4)).to(tl.pointer_type(tl.float32)), mask=in_range, other=0.0
        )
        codes_less_zero = int8_values(packed, DTYPE) if FORMAT == INT8 else e4m3_numbers(packed, DTYPE)
    return codes_less_zero, scales


@triton.jit
def dequantize_pages_kernel(  # type: ignore[no-untyped-def]
    key_pages, value_pages, blocks, keys, values, block_rows, head_dim, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr, HALF_DIM: tl.constexpr,
):  # fmt: skip
    """Dequantize ROWS rows of a page of keys or of values."""
    page = tl.program_id(0).to(tl.int64)
    row, lane = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    in_range = row < block_rows
    source_rows = tl.load(blocks + page).to(tl.int64) * block_rows + row
    target = (page * block_rows + row)[:, None] * head_dim + lane[None, :]
    DTYPE: tl.constexpr = keys.dtype.element_ty
    if tl.program_id(2) == 0:
        pages, out = key_pages, keys
    else:
        pages, out = value_pages, values
    codes, scales = load_kv_rows(pages, source_rows, in_range, lane, head_dim, DTYPE, FORMAT, ROW_BYTES, HALF_DIM)
    x = deinterleave(codes.to(tl.float32) * scales[:, None], FORMAT, HALF_DIM)
    tl.store(out + target, x.to(DTYPE), mask=in_range[:, None] & (lane < head_dim)[None, :])


def dequantize_pages(
    key_pages: Tensor, value_pages: Tensor, blocks: Tensor, kv_quant: KVQuantFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Dequantize some blocks of the KV cache: K and V, [pages, block_size, kv heads, head_dim]. Both stay rotated."""
    _, block_size, kv_heads, _ = key_pages.shape
    shape = (len(blocks), block_size, kv_heads, kv_quant.head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=key_pages.device) for _ in range(2))
    constants = {name: value for name, value in kernel_constants(kv_quant).items() if name != "HADAMARD_STEPS"}
    block_rows = block_size * kv_heads
    dequantize_pages_kernel[(len(blocks), triton.cdiv(block_rows, 32), 2)](
        key_pages, value_pages, blocks, keys, values, block_rows, kv_quant.head_dim,
        HEAD_DIM=padded_head_dim(kv_quant, kv_quant.head_dim), ROWS=32, **constants, num_warps=4,
    )  # fmt: skip
    return keys, values


@triton.jit
def store_kv_row(  # type: ignore[no-untyped-def]
    pages, row, x, written, lane, head_dim, FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr, HALF_DIM: tl.constexpr
):
    """Quantize and store a vector [HEAD_DIM], zero-padded behind `head_dim`, if `written`; return it dequantized, in
    float32."""
    inside = (lane < head_dim) & written
    x32 = x.to(tl.float32)
    if FORMAT == UNQUANTIZED:
        tl.store(pages + row * head_dim + lane, x, mask=inside)
        dequantized = x32
    elif FORMAT == INT4:
        dequantized = store_int4_row(pages + row * ROW_BYTES, x32, written, lane, head_dim, ROW_BYTES, HALF_DIM)
    elif FORMAT == INT3:
        dequantized = store_int3_row(pages + row * ROW_BYTES, x32, written, lane, head_dim, ROW_BYTES)
    else:
        scale = tl.maximum(divide_exact(tl.max(tl.abs(x32), axis=0), 127.0 if FORMAT == INT8 else 448.0), 1e-30)
        if FORMAT == INT8:
            codes = round_even(divide_exact(x32, scale)).to(tl.int32)
            dequantized = codes.to(tl.float32) * scale
        else:
            codes = e4m3_codes(divide_exact(x32, scale))
            dequantized = e4m3_values(codes) * scale
        tl.store(pages + row * ROW_BYTES + lane, codes.to(tl.uint8), mask=inside)
        tl.store((pages + row * ROW_BYTES + (ROW_BYTES - 4)).to(tl.pointer_type(tl.float32)), scale, mask=written)
    return dequantized


@triton.jit
def store_int4_row(row_ptr, x, written, lane, head_dim, ROW_BYTES: tl.constexpr, HALF_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store two codes per byte, and scale and zero point in the two halves of a word."""
    high, low = tl.maximum(tl.max(x, axis=0), 0.0), tl.minimum(tl.min(x, axis=0), 0.0)
    scale = tl.maximum((high - low) * 0.0625, 1e-7).to(tl.float16)
    step = scale.to(tl.float32)
    zero = tl.minimum(tl.maximum(round_even(divide_exact(-low * INT4_CLIP, step)), 0.0), 15.0)
    codes = tl.minimum(tl.maximum(round_even(divide_exact(x, step)) + zero, 0.0), 15.0)
    moved = tl.where(lane < head_dim, codes, 0.0).to(tl.int32) << tl.where(lane < HALF_DIM, 0, 4)
    packed = tl.sum(tl.reshape(moved, [x.shape[0] // HALF_DIM, HALF_DIM]), axis=0)
    byte_index = tl.arange(0, HALF_DIM)
    tl.store(row_ptr + byte_index, packed.to(tl.uint8), mask=(byte_index >= 0) & written)
    word = (scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (zero.to(tl.int32) << 16)
    tl.store((row_ptr + (ROW_BYTES - 4)).to(tl.pointer_type(tl.int32)), word, mask=written)
    return (codes - zero) * step


@triton.jit
def store_int3_row(row_ptr, x, written, lane, head_dim, ROW_BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store three words per 32 codes, and scale and zero point in the two halves of a word."""
    high, low = tl.maximum(tl.max(x, axis=0), 0.0), tl.minimum(tl.min(x, axis=0), 0.0)
    scale = tl.maximum((high - low) * 0.125, 1e-7).to(tl.float16)
    step = scale.to(tl.float32)
    zero = tl.minimum(tl.maximum(round_even(divide_exact(-low * INT3_CLIP, step)), 0.0), 7.0)
    codes = tl.minimum(tl.maximum(round_even(divide_exact(x, step)) + zero, 0.0), 7.0)
    code = tl.where(lane < head_dim, codes, 0.0).to(tl.int32)
    slot, half = lane % 32 // 2, lane % 2
    group = tl.arange(0, x.shape[0] // 32)
    words = row_ptr.to(tl.pointer_type(tl.int32))
    for word in tl.static_range(3):
        in_word = (slot >= 5 * word) & (slot < 5 * word + 5)
        moved = tl.where(in_word, code << tl.where(in_word, 3 * (slot - 5 * word), 0), 0)
        moved = tl.where(slot == 15, ((code >> word) & 1) << 15, moved) << (16 * half)
        packed = tl.sum(tl.reshape(moved, [x.shape[0] // 32, 32]), axis=1)
        tl.store(words + 3 * group + word, packed, mask=(32 * group < head_dim) & written)
    qparams = (scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (zero.to(tl.int32) << 16)
    tl.store(words + (ROW_BYTES // 4 - 1), qparams, mask=written)
    return (codes - zero) * step


@triton.jit
def hadamard_if(x, DTYPE: tl.constexpr, HADAMARD_STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotate rows [..., HEAD_DIM] by the orthonormal Hadamard matrix of order 2^HADAMARD_STEPS, in DTYPE:
    one butterfly step per factor of two."""
    SHAPE: tl.constexpr = x.shape
    COUNT: tl.constexpr = x.numel
    x = x.to(DTYPE)
    if HADAMARD_STEPS:
        x32 = x.to(tl.float32)
        for step in tl.static_range(HADAMARD_STEPS):
            pairs = tl.reshape(x32, [COUNT // (2 << step), 2, 1 << step])
            first, second = tl.split(tl.permute(pairs, [0, 2, 1]))
            pairs = tl.permute(tl.join(first + second, first - second), [0, 2, 1])
            x32 = tl.reshape(pairs, SHAPE)
        x = (x32 * (2.0 ** (-0.5 * HADAMARD_STEPS))).to(DTYPE)
    return x


@triton.jit
def hadamard_rows_kernel(  # type: ignore[no-untyped-def]
    x, rows, HEAD_DIM: tl.constexpr, HADAMARD_STEPS: tl.constexpr, ROWS: tl.constexpr
):
    """Rotate ROWS rows in place."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pointers = x + row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    inside = (row < rows)[:, None]
    values = tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, hadamard_if(values, x.dtype.element_ty, HADAMARD_STEPS), mask=inside)


def unrotate_output(output: Tensor, kv_quant: KVQuantFormat) -> Tensor:
    """Rotate the output of attention over dequantized pages [tokens, heads, head_dim] back, in place."""
    if kv_quant.hadamard:
        rows, steps = output.shape[0] * output.shape[1], kernel_constants(kv_quant)["HADAMARD_STEPS"]
        hadamard_rows_kernel[(triton.cdiv(rows, 8),)](
            output, rows, HEAD_DIM=kv_quant.head_dim, HADAMARD_STEPS=steps, ROWS=8, num_warps=4
        )
    return output
