"""Pieces of every kernel here: scales and codes as they are stored, read into registers.

A code becomes a float without an integer-to-float conversion, which runs at a quarter of the rate of other
instructions. A float32 whose bits are an integer below 2^24 is that integer times 2^-149, as subnormal numbers are
equally spaced: so a code that is masked out of a word, where it stands, is already a float. The same holds for E2M1:
its exponent and mantissa, put at the foot of a float32's exponent, are its value times 2^-126. The other factor is made
larger by a power of two, so that the products are ordinary numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

ENLARGED = tl.constexpr(2.0**64)  # the other factor
INTEGER_UNIT = tl.constexpr(2.0**85)  # 2^149 / 2^64
E2M1_UNIT = tl.constexpr(2.0**62)  # 2^126 / 2^64


@triton.jit
def stored_scale(raw, KIND: tl.constexpr):
    """A stored scale as float32. The one-byte kinds are read as bytes."""
    if KIND == "e8m0":
        byte = raw.to(tl.int32)
        bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
        value = bits.to(tl.float32, bitcast=True)
    elif KIND == "e5m2":
        value = (raw.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "e4m3":
        byte = raw.to(tl.int32)
        bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, the difference of the biases
        value = tl.where((byte & 0x7F) == 0x7F, float("nan"), value)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def integer_in_place(word, FIRST: tl.constexpr, BITS: tl.constexpr):
    """The code whose lowest bit is bit FIRST of a word: a float32 that is `place_value` times 2^149 too small."""
    SHIFT: tl.constexpr = 0 if FIRST + BITS <= 24 else 8
    return ((word >> SHIFT) & (((1 << BITS) - 1) << (FIRST - SHIFT))).to(tl.float32, bitcast=True)


@triton.jit
def straddling(word, after, FIRST: tl.constexpr, BITS: tl.constexpr):
    """The same for a code that begins in one word and ends in the next one; it stands at bit 0."""
    low = (word >> FIRST) & ((1 << (32 - FIRST)) - 1)
    return ((low | (after << (32 - FIRST))) & ((1 << BITS) - 1)).to(tl.float32, bitcast=True)


@triton.constexpr_function
def place_value(first: int, bits: int) -> float:
    """What a code that was left in its place is multiplied by to be itself (times 2^-149)."""
    return 2.0 ** -(first if first + bits <= 24 else first - 8)


@triton.jit
def e2m1_in_place(word, FIRST: tl.constexpr):
    """The E2M1 number at bit FIRST of a signed 32-bit word: the bits of a float32 that is 2^126 too small. The second
    shift copies the sign, which the mask then leaves at the top alone."""
    return ((word << (28 - FIRST)) >> 6) & -2118123520  # 0x81C00000


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(t):
    """[n, m] -> [n]: the largest magnitude of each row; NaN where one is."""
    return tl.reduce(tl.abs(t), 1, _larger)


@triton.jit
def fixed_point(largest):
    """Powers of two that bring numbers of at most this magnitude into 16 bits, and back; NaN where it is not finite.
    All that half precision has (8 or 11 bits) is kept of a number unless it is 2^7 (2^4) times smaller."""
    power = tl.maximum(largest, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000  # of two, below the largest
    into = (2248146944 - power.to(tl.int64)).to(tl.int32)  # (2 * 127 + 14) << 23
    back = (power - 117440512).to(tl.float32, bitcast=True)  # 14 << 23
    return into.to(tl.float32, bitcast=True), tl.where(largest < float("inf"), back, float("nan"))


@triton.jit
def pair(first, second, PTX: tl.constexpr):
    """Two numbers below 2^15, rounded to whole ones, in the halves of a word."""
    a = (first + 12582912.0).to(tl.int32, bitcast=True)  # the last bits of 1.5 * 2^23 plus a number are that number
    b = (second + 12582912.0).to(tl.int32, bitcast=True)
    if PTX:
        word = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], tl.int32, True, 1)
    else:
        word = (a & 0xFFFF) | (b << 16)
    return word


@triton.jit
def dot_pair(pairs, octets, total, HIGH: tl.constexpr, PTX: tl.constexpr):
    """total + first * byte + second * byte, for the two lower or the two upper bytes of a word."""
    if PTX and HIGH:
        total = tl.inline_asm_elementwise(
            "dp2a.hi.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [pairs, octets, total], tl.int32, True, 1
        )
    elif PTX:
        total = tl.inline_asm_elementwise(
            "dp2a.lo.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [pairs, octets, total], tl.int32, True, 1
        )
    else:
        two = octets >> (16 if HIGH else 0)
        total += ((pairs << 16) >> 16) * (two & 0xFF) + (pairs >> 16) * ((two >> 8) & 0xFF)
    return total


@triton.jit
def pick(t, INDEX: tl.constexpr, COUNT: tl.constexpr):
    """[..., COUNT] -> [...]: one entry of the last axis (COUNT is a power of two). A thread that holds the whole axis
    moves no data for it."""
    if COUNT == 1:
        found = tl.reshape(t, t.shape[:-1])
    else:
        even, odd = tl.split(tl.reshape(t, t.shape[:-1] + [COUNT // 2, 2]))  # noqa: RUF005
        if INDEX % 2 == 0:
            found = pick(even, INDEX // 2, COUNT // 2)
        else:
            found = pick(odd, INDEX // 2, COUNT // 2)
    return found
