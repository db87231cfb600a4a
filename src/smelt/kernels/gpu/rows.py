"""Rows of pages in Triton: a head's key or value as numbers, or as codes with a word behind them.

`smelt.kernels.kv_quant` says what they hold. Codes are exact in any type that a network computes in, so that they are
multiplied as they are, and their scales are applied outside of the products: those of keys to scores, those of values
to the weights of a softmax. Kernels are told of a format by four constants: FORMAT; ROW, the bytes of a row; HALF_ROW,
the codes of four bits in the low halves of its bytes; and TURNS, of how many steps the Hadamard matrix is made.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smelt.kernels import kv_quant as row_format
from smelt.kernels.gpu.codes import e4m3_codes, e4m3_numbers, e4m3_values, half_values, int8_values
from smelt.kernels.kv_quant import KVQuantFormat

NUMBERS, INT8, FP8, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FORMATS = {row_format.INT8: 1, row_format.FP8: 2, row_format.INT4: 3}
WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: numbers of its size have nothing behind the point


def constants(rows: KVQuantFormat | None) -> dict[str, int]:
    """What a kernel is told."""
    if rows is None:
        return {"FORMAT": 0, "ROW": 0, "HALF_ROW": 1, "TURNS": 0}
    turns = rows.head_dim.bit_length() - 1 if rows.hadamard else 0
    return {"FORMAT": FORMATS[rows.name], "ROW": rows.row_bytes, "HALF_ROW": rows.half_dim, "TURNS": turns}


def width_of(rows: KVQuantFormat | None, last: int) -> int:
    """Numbers of a head, in pages whose last axis is this long."""
    return last if rows is None else rows.head_dim


@triton.jit
def lift(FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """By how much scales of values are held larger, and sums of values with them: a weight times a scale would be too
    small for float16, times the largest code it is not."""
    LIFT: tl.constexpr = 1.0 if FORMAT == NUMBERS else 128.0 if FORMAT == INT8 else 512.0 if FORMAT == FP8 else 16.0
    return LIFT


@triton.jit
def rounded(x):  # type: ignore[no-untyped-def]
    """To whole numbers below 2^22, ties to even."""
    return (x + WHOLE) - WHOLE


@triton.jit
def steps_of(x, step):  # type: ignore[no-untyped-def]
    """x / step to the last bit, as the reference divides."""
    return tl.div_rn(x, tl.zeros_like(x) + step)


@triton.jit
def as_read(x, FORMAT: tl.constexpr, HALF_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """[count, WIDTH] in the order in which rows are read: the two codes of a byte beside each other."""
    COUNT: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    if FORMAT == INT4 and WIDTH == 2 * HALF_ROW:
        x = tl.reshape(tl.permute(tl.reshape(x, [COUNT, 2, HALF_ROW]), [0, 2, 1]), [COUNT, WIDTH])
    return x


@triton.jit
def as_written(x, FORMAT: tl.constexpr, HALF_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The way back."""
    COUNT: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    if FORMAT == INT4 and WIDTH == 2 * HALF_ROW:
        x = tl.reshape(tl.permute(tl.reshape(x, [COUNT, HALF_ROW, 2]), [0, 2, 1]), [COUNT, WIDTH])
    return x


@triton.jit
def load_rows(  # type: ignore[no-untyped-def]
    pages, rows, there, lane, width, DTYPE: tl.constexpr, FORMAT: tl.constexpr, ROW: tl.constexpr,
    HALF_ROW: tl.constexpr,
):  # fmt: skip
    """Codes less their zeros [rows, WIDTH] in a type for products, in the order that `as_read` gives, and their scales
    [rows]. Of numbers, these themselves and no scales."""
    COUNT: tl.constexpr = rows.shape[0]
    WIDTH: tl.constexpr = lane.shape[0]
    inside = there[:, None] & (lane < width)[None, :]
    if FORMAT == NUMBERS:
        numbers = tl.load(pages + rows[:, None] * width + lane[None, :], mask=inside, other=0.0)
        scales = there
    elif FORMAT == INT4:
        word = tl.load((pages + rows * ROW + (ROW - 4)).to(tl.pointer_type(tl.int32)), mask=there, other=0)
        zeros = (word >> 16)[:, None]
        if WIDTH == 2 * HALF_ROW:
            octet = tl.arange(0, HALF_ROW)[None, :]
            octets = tl.load(pages + rows[:, None] * ROW + octet, mask=there[:, None], other=0)
            numbers = tl.reshape(tl.join(*half_values(octets, zeros, DTYPE)), [COUNT, WIDTH])
        else:
            octets = tl.load(pages + rows[:, None] * ROW + (lane % HALF_ROW)[None, :], mask=inside, other=0)
            codes = (octets.to(tl.int32) >> tl.where(lane < HALF_ROW, 0, 4)[None, :]) & 15
            numbers = (codes - zeros).to(tl.float32).to(DTYPE)
        scales = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        octets = tl.load(pages + rows[:, None] * ROW + lane[None, :], mask=inside, other=0)
        scales = tl.load((pages + rows * ROW + (ROW - 4)).to(tl.pointer_type(tl.float32)), mask=there, other=0.0)
        numbers = int8_values(octets, DTYPE) if FORMAT == INT8 else e4m3_numbers(octets, DTYPE)
    return numbers, scales


@triton.jit
def write_row(  # type: ignore[no-untyped-def]
    pages, row, x, written, lane, width, FORMAT: tl.constexpr, ROW: tl.constexpr, HALF_ROW: tl.constexpr
):
    """A vector [WIDTH] with zeros behind its `width` into its row, if it is to be `written`; and, in float32, as it is
    read from there."""
    inside = (lane < width) & written
    wide = x.to(tl.float32)
    if FORMAT == NUMBERS:
        tl.store(pages + row * width + lane, x, mask=inside)
        held = wide
    elif FORMAT == INT4:
        held = write_four_bits(pages + row * ROW, wide, written, lane, width, ROW, HALF_ROW)
    else:
        step = tl.maximum(steps_of(tl.max(tl.abs(wide), axis=0), 127.0 if FORMAT == INT8 else 448.0), 1e-30)
        if FORMAT == INT8:
            codes = rounded(steps_of(wide, step)).to(tl.int32)
            held = codes.to(tl.float32) * step
        else:
            codes = e4m3_codes(steps_of(wide, step))
            held = e4m3_values(codes) * step
        tl.store(pages + row * ROW + lane, codes.to(tl.uint8), mask=inside)
        tl.store((pages + row * ROW + (ROW - 4)).to(tl.pointer_type(tl.float32)), step, mask=written)
    return held


@triton.jit
def write_four_bits(to, x, written, lane, width, ROW: tl.constexpr, HALF_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two codes a byte, and scale and zero in two halves of a word."""
    high, low = tl.maximum(tl.max(x, axis=0), 0.0), tl.minimum(tl.min(x, axis=0), 0.0)
    scale = tl.maximum(steps_of(high - low, 15.0), 1e-7).to(tl.float16)
    step = scale.to(tl.float32)
    zero = tl.minimum(tl.maximum(rounded(steps_of(-low, step)), 0.0), 15.0)
    codes = tl.minimum(tl.maximum(rounded(steps_of(x, step)) + zero, 0.0), 15.0)
    moved = tl.where(lane < width, codes, 0.0).to(tl.int32) << tl.where(lane < HALF_ROW, 0, 4)
    octets = tl.sum(tl.reshape(moved, [x.shape[0] // HALF_ROW, HALF_ROW]), axis=0)
    octet = tl.arange(0, HALF_ROW)
    tl.store(to + octet, octets.to(tl.uint8), mask=(octet >= 0) & written)
    word = (scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (zero.to(tl.int32) << 16)
    tl.store((to + (ROW - 4)).to(tl.pointer_type(tl.int32)), word, mask=written)
    return (codes - zero) * step


@triton.jit
def met(x, DTYPE: tl.constexpr, TURNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries or keys [..., WIDTH] as they meet each other, in their own type: multiplied by the orthonormal Hadamard
    matrix of order 2^TURNS, a step of sums and differences for each factor of two."""
    SHAPE: tl.constexpr = x.shape
    COUNT: tl.constexpr = x.numel
    x = x.to(DTYPE)
    if TURNS:
        wide = x.to(tl.float32)
        for step in tl.static_range(TURNS):
            pairs = tl.reshape(wide, [COUNT // (2 << step), 2, 1 << step])
            first, second = tl.split(tl.permute(pairs, [0, 2, 1]))
            pairs = tl.permute(tl.join(first + second, first - second), [0, 2, 1])
            wide = tl.reshape(pairs, SHAPE)
        x = (wide * (2.0 ** (-0.5 * TURNS))).to(DTYPE)
    return x
