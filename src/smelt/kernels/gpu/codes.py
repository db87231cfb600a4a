"""Codes of eight and four bits in Triton, and the numbers they stand for.

What is read for products in bfloat16 is made four codes at a time, by instructions that work on two numbers of 16 bits:
an attention that reads codes has more to do for each of them than for a number, and would else take longer than one
that reads twice as many bytes. A code of up to seven bits, written behind the exponent of 128, is 128 and the code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smelt.kernels.gpu.arch import PTX

PACKED = tl.constexpr(PTX)
BIAS = tl.constexpr(2.0**120)  # E4M3 is float32, or bfloat16, with fewer bits, but for the bias of the exponent
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


@triton.jit
def int8_values(octets, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of bytes; Triton itself takes four at a time here."""
    return octets.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)


@triton.jit
def e4m3_numbers(octets, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of bytes, in a type for products."""
    if PACKED and tl.bfloat16 == DTYPE:
        numbers = tl.inline_asm_elementwise(FOUR_E4M3, "=r,=r,r", [octets], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        numbers = e4m3_values(octets.to(tl.int32)).to(DTYPE)
    return numbers


@triton.jit
def half_values(octets, zeros, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes in the low and in the high halves of bytes [rows, octets], less the zeros of their rows [rows, 1]."""
    if PACKED and tl.bfloat16 == DTYPE:
        away = tl.broadcast_to((-OFF - zeros.to(tl.float32)).to(tl.bfloat16), octets.shape)
        low, high = tl.inline_asm_elementwise(
            FOUR_PAIRS, "=r,=r,=r,=r,r,r,r", [octets, away], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        both = octets.to(tl.int32)
        low = ((both & 15) - zeros).to(tl.float32).to(DTYPE)
        high = ((both >> 4) - zeros).to(tl.float32).to(DTYPE)
    return low, high


@triton.jit
def e4m3_values(codes):  # type: ignore[no-untyped-def]
    """Of int32."""
    bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * BIAS


@triton.jit
def e4m3_codes(x):  # type: ignore[no-untyped-def]
    """Of numbers up to 448, as int32; ties to even."""
    bits = (x * UNBIAS).to(tl.int32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    nearest = (rest + ((rest >> 20) & 1) + 0x7FFFF) >> 20
    return ((bits >> 24) & 0x80) | tl.minimum(nearest, 0x7E)
