"""Building blocks of the kernels: dequantize stored scales and codes in registers.

Codes become floats without an integer-to-float conversion, which runs at a quarter of the rate of other instructions. A
float32 whose bits are an integer below 2^24 is that integer times 2^-149, as subnormals are equally spaced: a code that
is masked out of a word in place is already a float. Likewise E2M1: its exponent and mantissa at the low end of the
float32 exponent are its value times 2^-126. The other factor is scaled up by a power of two, so that products are
normal numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

ENLARGED = tl.constexpr(2.0**64)  # the other factor
INTEGER_UNIT = tl.constexpr(2.0**85)  # 2^149 / 2^64
E2M1_UNIT = tl.constexpr(2.0**62)  # 2^126 / 2^64


@triton.jit
def decode_scale(raw, SCALE_DTYPE: tl.constexpr):
    """Convert a stored scale to float32. One-byte dtypes are read as bytes."""
    if SCALE_DTYPE == "e8m0":
        byte = raw.to(tl.int32)
        bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
        value = bits.to(tl.float32, bitcast=True)
    elif SCALE_DTYPE == "e5m2":
        value = (raw.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif SCALE_DTYPE == "e4m3":
        byte = raw.to(tl.int32)
        bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, the difference of the exponent biases
        value = tl.where((byte & 0x7F) == 0x7F, float("nan"), value)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def integer_in_place(word, FIRST: tl.constexpr, BITS: tl.constexpr):
    """Return the code at bit FIRST of a word, as a float32 to be multiplied by `place_value` and 2^149."""
    SHIFT: tl.constexpr = 0 if FIRST + BITS <= 24 else 8
    return ((word >> SHIFT) & (((1 << BITS) - 1) << (FIRST - SHIFT))).to(tl.float32, bitcast=True)


@triton.jit
def straddling_code(word, after, FIRST: tl.constexpr, BITS: tl.constexpr):
    """Return a code that straddles two words, as a float32 to be multiplied by 2^149."""
    low = (word >> FIRST) & ((1 << (32 - FIRST)) - 1)
    return ((low | (after << (32 - FIRST))) & ((1 << BITS) - 1)).to(tl.float32, bitcast=True)


@triton.constexpr_function
def place_value(first: int, bits: int) -> float:
    """Return the factor that maps a code masked in place to its value (times 2^-149)."""
    return 2.0 ** -(first if first + bits <= 24 else first - 8)


@triton.jit
def e2m1_in_place(word, FIRST: tl.constexpr):
    """Return the E2M1 code at bit FIRST of a signed 32-bit word, as the bits of a float32 that is 2^126 too small. The
    second shift extends the sign, of which the mask keeps the top bit."""
    return ((word << (28 - FIRST)) >> 6) & -2118123520  # 0x81C00000


@triton.jit
def _max_with_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_amax(t):
    """Return the largest magnitude of each row: [n, m] -> [n]; NaN propagates."""
    return tl.reduce(tl.abs(t), 1, _max_with_nan)


@triton.jit
def fixed_point(amax):
    """Return the power of two that scales values of at most this magnitude to 16-bit integers, and its inverse (NaN if
    not finite). All bits of half precision (8 or 11) are kept unless a value is 2^7 (2^4) times smaller."""
    power = tl.maximum(amax, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000  # power of two not above the largest
    to_fixed = (2248146944 - power.to(tl.int64)).to(tl.int32)  # (2 * 127 + 14) << 23
    from_fixed = (power - 117440512).to(tl.float32, bitcast=True)  # 14 << 23
    return to_fixed.to(tl.float32, bitcast=True), tl.where(amax < float("inf"), from_fixed, float("nan"))


@triton.jit
def pack_pair(first, second, PTX: tl.constexpr):
    """Round two numbers below 2^15 to integers and pack them into the halves of a word."""
    a = (first + 12582912.0).to(tl.int32, bitcast=True)  # the low bits of 1.5 * 2^23 + n are the integer n
    b = (second + 12582912.0).to(tl.int32, bitcast=True)
    if PTX:
        word = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], tl.int32, True, 1)
    else:
        word = (a & 0xFFFF) | (b << 16)
    return word


@triton.jit
def dot_pair(pairs, octets, total, HIGH: tl.constexpr, PTX: tl.constexpr):
    """Return total + first * byte + second * byte for the two low or the two high bytes of a word."""
    if PTX and HIGH:
        total = tl.inline_asm_elementwise(
            "dp2a.hi.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [pairs, octets, total], tl.int32, True, 1
        )
    elif PTX:
        total = tl.inline_asm_elementwise(
            "dp2a.lo.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [pairs, octets, total], tl.int32, True, 1
        )
    else:
        octet_pair = octets >> (16 if HIGH else 0)
        total += ((pairs << 16) >> 16) * (octet_pair & 0xFF) + (pairs >> 16) * ((octet_pair >> 8) & 0xFF)
    return total


@triton.jit
def pick(t, INDEX: tl.constexpr, COUNT: tl.constexpr):
    """Select one entry of the last axis: [..., COUNT] -> [...] (COUNT is a power of two). No data moves if each thread
    holds the full axis."""
    if COUNT == 1:
        entry = tl.reshape(t, t.shape[:-1])
    else:
        even, odd = tl.split(tl.reshape(t, t.shape[:-1] + [COUNT // 2, 2]))  # noqa: RUF005
        if INDEX % 2 == 0:
            entry = pick(even, INDEX // 2, COUNT // 2)
        else:
            entry = pick(odd, INDEX // 2, COUNT // 2)
    return entry
