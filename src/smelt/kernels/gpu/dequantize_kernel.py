"""Dequantize a full matrix of any format for a dense library GEMM (large batches).

One pass over the codes, amortized over the batch. With uint8 output it holds integers plus 128 without scales: a matrix
of 8-bit integers for the 8-bit GEMM.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smelt.kernels.gpu.dequant import decode_scale


@triton.jit
def dequantize_kernel(
    codes, scale, zero, negative, tensor, table, out, rows, columns, octets, scale_stride, BITS: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE_DTYPE: tl.constexpr, DEFAULT_ZERO: tl.constexpr, GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write out [rows, columns]. `octets`: bytes per row of codes; `table`: values of codes if ELEMENT is `table`."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    inside = (row < rows) & (column < columns)
    bit = column * BITS
    octet = codes + row.to(tl.int64) * octets + (bit >> 3)
    word = tl.load(octet, mask=inside, other=0).to(tl.int32)
    if 8 % BITS != 0:
        straddles = inside & ((bit & 7) + BITS > 8)
        word |= tl.load(octet + 1, mask=straddles, other=0).to(tl.int32) << 8
    code = (word >> (bit & 7)) & ((1 << BITS) - 1)
    group_index = row * scale_stride + (column // GROUP_SIZE if GROUP_SIZE > 0 else 0 * column)
    MAX_CODE: tl.constexpr = (1 << BITS) - 1
    if out.dtype.element_ty == tl.uint8:
        zero_point = DEFAULT_ZERO
        if zero is not None:
            zero_point = tl.load(zero + group_index, mask=inside, other=0).to(tl.int32)
        integer = code - zero_point
        if ELEMENT == "dint":
            integer = tl.where(code == MAX_CODE - 1, 1, tl.where(code == MAX_CODE, -1, 2 * integer))
        tl.store(out + row.to(tl.int64) * columns + column, (integer + 128).to(tl.uint8), mask=inside)
    else:
        factor = decode_scale(tl.load(scale + group_index, mask=inside, other=0), SCALE_DTYPE)
        if ELEMENT == "table":
            value = tl.load(table + code)
        elif ELEMENT == "e2m1":
            bits = ((code & 8) << 28) | ((code & 7) << 22)
            value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
        else:
            value = code.to(tl.float32)
            if zero is not None:
                value -= tl.load(zero + group_index, mask=inside, other=0).to(tl.float32)
            else:
                value -= DEFAULT_ZERO
            if ELEMENT == "dint":
                value = tl.where(code == MAX_CODE - 1, 0.5, tl.where(code == MAX_CODE, -0.5, value))
        if negative is not None:
            negative_scale = decode_scale(tl.load(negative + group_index, mask=inside, other=0), SCALE_DTYPE)
            factor = tl.where(value > 0, factor, negative_scale)
        if tensor is not None:
            factor = tl.div_rn(factor, tl.load(tensor))
        tl.store(out + row.to(tl.int64) * columns + column, (value * factor).to(out.dtype.element_ty), mask=inside)
