"""Conversion of 8-bit, 4-bit and 3-bit codes in Triton.

For products in bfloat16, codes are converted four at a time by packed 16-bit instructions: otherwise attention over a
quantized KV cache would take longer than over one with twice as many bytes. A code of up to seven bits in the mantissa
of the bfloat16 number 128 yields 128 + code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smelt.kernels.gpu.arch import PTX

PACKED = tl.constexpr(PTX)
BIAS = tl.constexpr(2.0**120)  # E4M3 is a truncated float32 or bfloat16, up to the exponent bias
UNBIAS = tl.constexpr(2.0**-120)
OFF = tl.constexpr(128.0)
FOUR_E4M3 = tl.constexpr("""{
.reg .b32 first, second, signs, more, bias, none;
mov.b32 bias, 0x7b807b80;
mov.b32 none, 0x80008000;
prmt.b32 first, $2, 0, 0x1404;
prmt.b32 second, $2, 0, 0x3424;
and.b32 signs, first, 0x80008000;
and.b32 more, second, 0x80008000;
shr.u32 first, first, 4;
shr.u32 second, second, 4;
lop3.b32 first, first, 0x07f007f0, signs, 0xea;
lop3.b32 second, second, 0x07f007f0, more, 0xea;
fma.rn.bf16x2 $0, first, bias, none;
fma.rn.bf16x2 $1, second, bias, none;
}""")
FOUR_PAIRS = tl.constexpr("""{
.reg .b32 first, second, low, high, one;
mov.b32 one, 0x3f803f80;
prmt.b32 first, $4, 0, 0x4140;
prmt.b32 second, $4, 0, 0x4342;
lop3.b32 low, first, 0x000f000f, 0x43004300, 0xea;
lop3.b32 high, second, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, low, one, $5;
fma.rn.bf16x2 $1, high, one, $6;
shr.u32 first, first, 4;
shr.u32 second, second, 4;
lop3.b32 low, first, 0x000f000f, 0x43004300, 0xea;
lop3.b32 high, second, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $2, low, one, $5;
fma.rn.bf16x2 $3, high, one, $6;
}""")
SUBTRACT_PAIR = tl.constexpr("""{
.reg .b32 minus;
mov.b32 minus, 0xbf80bf80;
fma.rn.bf16x2 $0, $2, minus, $1;
}""")
TOP_OF_PAIR = tl.constexpr(0x00700070)  # the highest three bits of the mantissa of two bfloat16 numbers
ONE, ONE_PAIR = tl.constexpr(0x3F80), tl.constexpr(0x3F803F80)  # in bfloat16


@triton.jit
def int8_values(octets, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert int8 codes in bytes; Triton converts four at a time here."""
    return octets.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)


@triton.jit
def e4m3_numbers(octets, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert E4M3 codes in bytes to a dtype for products."""
    if PACKED and tl.bfloat16 == DTYPE:
        values = tl.inline_asm_elementwise(FOUR_E4M3, "=r,=r,r", [octets], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        values = e4m3_values(octets.to(tl.int32)).to(DTYPE)
    return values


@triton.jit
def half_values(octets, zeros, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the low and high nibbles of bytes [rows, octets] minus the zero points of their rows [rows, 1]."""
    if PACKED and tl.bfloat16 == DTYPE:
        offset = tl.broadcast_to((-OFF - zeros.to(tl.float32)).to(tl.bfloat16), octets.shape)
        low, high = tl.inline_asm_elementwise(
            FOUR_PAIRS, "=r,=r,=r,=r,r,r,r", [octets, offset], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        octets32 = octets.to(tl.int32)
        low = ((octets32 & 15) - zeros).to(tl.float32).to(DTYPE)
        high = ((octets32 >> 4) - zeros).to(tl.float32).to(DTYPE)
    return low, high


@triton.jit
def int3_pairs(first, second, third):  # type: ignore[no-untyped-def]
    """Unpack three words of 32 codes each [rows, groups]: pairs of neighboring codes [rows, 16 * groups] in the bits
    TOP_OF_PAIR of an int32."""
    last = ((first >> 11) & 0x00100010) | ((second >> 10) & 0x00200020) | ((third >> 9) & 0x00400040)
    even = tl.join(tl.join(tl.join(first << 4, second >> 5), tl.join(first >> 8, third >> 2)),
                   tl.join(tl.join(first >> 2, third << 4), tl.join(second << 1, third >> 8)))  # fmt: skip
    odd = tl.join(tl.join(tl.join(first << 1, second >> 8), tl.join(second << 4, third >> 5)),
                  tl.join(tl.join(first >> 5, third << 1), tl.join(second >> 2, last)))  # fmt: skip
    pairs = tl.join(even, odd)
    return tl.reshape(pairs & TOP_OF_PAIR, [first.shape[0], 16 * first.shape[1]])


@triton.jit
def int3_values(first, second, third, zeros, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return an eighth of the codes in three words [rows, groups] minus the zero points of their rows [rows, 1]:
    [rows, 32 * groups]. In the top bits of the mantissa of one, codes are eighths."""
    ROWS: tl.constexpr = first.shape[0]
    VALUES: tl.constexpr = 32 * first.shape[1]
    pairs = int3_pairs(first, second, third)
    if PACKED and tl.bfloat16 == DTYPE:
        pairs = pairs | ONE_PAIR
        low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        offset = ((zeros << 4) + ONE).to(tl.int16).to(tl.bfloat16, bitcast=True)
        values = tl.inline_asm_elementwise(
            SUBTRACT_PAIR, "=r,r,r", [tl.reshape(tl.join(low, high), [ROWS, VALUES]),
            tl.broadcast_to(offset, [ROWS, VALUES])], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        codes = tl.reshape(tl.join(pairs & 0x70, pairs >> 16), [ROWS, VALUES])
        values = ((codes - (zeros << 4)).to(tl.float32) / 128).to(DTYPE)
    return values


@triton.jit
def e4m3_values(codes):  # type: ignore[no-untyped-def]
    """Convert E4M3 codes in int32 to float32."""
    bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * BIAS


@triton.jit
def e4m3_codes(x):  # type: ignore[no-untyped-def]
    """Round values of magnitude up to 448 to E4M3 codes in int32, ties to even."""
    bits = (x * UNBIAS).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + ((magnitude >> 20) & 1) + 0x7FFFF) >> 20
    return ((bits >> 24) & 0x80) | tl.minimum(rounded, 0x7E)
