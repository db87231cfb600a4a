"""Convert one plane of codes (the code at one position in every byte) to a tensor core operand.

Triton's own arithmetic handles each byte separately; inline PTX handles two or four bytes per register. Each has a
plain Triton version for the interpreter, which has no PTX; tests compare both with the reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smelt.kernels.gpu.codes import e4m3_numbers


@triton.constexpr_function
def integer_ptx(bits: int, plane: int, default_zero: int, bfloat16: bool) -> str:
    """Convert four codes to half precision: insert them into the low bits of 2^7 (bfloat16) or 2^10 (float16), which is
    then subtracted together with the default zero point."""
    dtype, base = ("bf16", 0x4300) if bfloat16 else ("f16", 0x6400)
    mask = (1 << bits) - 1
    return f"""{{
        .reg .b32 low, high, base;
        mov.b32 base, {base * 0x10001};
        prmt.b32 low, $2, 0, 0x4140;
        prmt.b32 high, $2, 0, 0x4342;
        shr.b32 low, low, {bits * plane};
        shr.b32 high, high, {bits * plane};
        lop3.b32 low, low, {mask * 0x10001}, base, 0xea;
        lop3.b32 high, high, {mask * 0x10001}, base, 0xea;
        mov.b32 base, {(base + default_zero) * 0x10001};
        sub.{dtype}x2 $0, low, base;
        sub.{dtype}x2 $1, high, base;
    }}"""


@triton.constexpr_function
def e2m1_ptx(plane: int, bfloat16: bool) -> str:
    """Convert four codes to half precision: move sign, exponent and mantissa, then multiply by 2^126 or 2^14."""
    dtype, up, unit = ("bf16", 6, 0x7E80) if bfloat16 else ("f16", 9, 0x7400)
    return f"""{{
        .reg .b32 low, high, sign, size, unit;
        mov.b32 unit, {unit * 0x10001};
        prmt.b32 low, $2, 0, 0x4140;
        prmt.b32 high, $2, 0, 0x4342;
        shl.b32 sign, low, {12 - 4 * plane};
        shl.b32 size, low, {up - 4 * plane};
        and.b32 size, size, {(7 << up) * 0x10001};
        lop3.b32 low, sign, 0x80008000, size, 0xea;
        shl.b32 sign, high, {12 - 4 * plane};
        shl.b32 size, high, {up - 4 * plane};
        and.b32 size, size, {(7 << up) * 0x10001};
        lop3.b32 high, sign, 0x80008000, size, 0xea;
        mul.{dtype}x2 $0, low, unit;
        mul.{dtype}x2 $1, high, unit;
    }}"""


@triton.constexpr_function
def int8_ptx(plane: int, denormal: bool) -> str:
    """Subtract the zero point from four 4-bit codes, given 128 - zero: no byte carries into the next, and the last
    `xor` removes 128. dINT is doubled: 2 (code - zero), given 128 - 2 zero, but code 14 is 1 and code 15 is -1."""
    special = """
        add.u32 mask, code, 0x02020202;
        shr.b32 mask, mask, 4;
        and.b32 mask, mask, 0x01010101;
        mul.lo.u32 mask, mask, 255;
        and.b32 half, code, 0x01010101;
        mad.lo.u32 half, half, 254, 0x01010101;
        shl.b32 code, code, 1;"""
    return f"""{{
        .reg .b32 code, mask, half;
        shr.b32 code, $1, {4 * plane};
        and.b32 code, code, 0x0f0f0f0f;
        {special if denormal else ""}
        add.u32 code, code, $2;
        {"xor.b32 code, code, 0x80808080;" if denormal else "xor.b32 $0, code, 0x80808080;"}
        {"lop3.b32 $0, mask, half, code, 0xca;" if denormal else ""}
    }}"""


@triton.jit
def code_plane(octets, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of a plane as int32."""
    return (octets.to(tl.int32) >> (PLANE * BITS)) & ((1 << BITS) - 1)


@triton.jit
def half_precision(octets, ASSEMBLY: tl.constexpr, BFLOAT16: tl.constexpr):
    if BFLOAT16:
        value = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [octets], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        value = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [octets], dtype=tl.float16, is_pure=True, pack=4)
    return value


@triton.jit
def float_plane(
    octets, PLANE: tl.constexpr, BITS: tl.constexpr, ELEMENT: tl.constexpr, DEFAULT_ZERO: tl.constexpr,
    DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return elements, or codes minus DEFAULT_ZERO, in half precision, where they are exact."""
    BFLOAT16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
    if ELEMENT == "e4m3":
        value = e4m3_numbers(octets, DTYPE)
    elif PTX and ELEMENT == "e2m1":
        value = half_precision(octets, e2m1_ptx(PLANE, BFLOAT16), BFLOAT16)
    elif PTX and (BITS < 8 or not BFLOAT16):
        value = half_precision(octets, integer_ptx(BITS, PLANE, DEFAULT_ZERO, BFLOAT16), BFLOAT16)
    elif ELEMENT == "e2m1":
        code = code_plane(octets, PLANE, BITS)
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        value = (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)  # 2^126
    elif PTX and DEFAULT_ZERO == 128:
        value = (octets ^ 0x80).to(tl.int8, bitcast=True).to(DTYPE)
    else:
        value = (code_plane(octets, PLANE, BITS) - DEFAULT_ZERO).to(tl.float32).to(DTYPE)
    return value


@triton.jit
def int8_plane(octets, zero, PLANE: tl.constexpr, BITS: tl.constexpr, ELEMENT: tl.constexpr, PTX: tl.constexpr):
    """Return codes minus the zero points of rows [rows] as int8 (8 bits: minus 128 instead); dINT is doubled."""
    if BITS == 8:
        value = (octets ^ 0x80).to(tl.int8, bitcast=True)
    elif PTX and BITS == 4:
        offset = 128 - 2 * zero if ELEMENT == "dint" else 128 - zero
        offsets = tl.broadcast_to(offset.to(tl.uint8)[:, None], octets.shape)
        value = tl.inline_asm_elementwise(
            int8_ptx(PLANE, ELEMENT == "dint"), "=r,r,r", [octets, offsets], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        code = code_plane(octets, PLANE, BITS)
        value = code - zero[:, None]
        if ELEMENT == "dint":
            MAX_CODE: tl.constexpr = (1 << BITS) - 1
            value = tl.where(code == MAX_CODE - 1, 1, tl.where(code == MAX_CODE, -1, 2 * value))
        value = value.to(tl.int8)
    return value
