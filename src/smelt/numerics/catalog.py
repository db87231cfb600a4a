"""Catalog of formats by name. `int4/128@float16` is 4-bit integers in groups of 128 with scales in float16.

A name is a base from the list, optionally followed by `/` and the group size (a number, `row` or `tensor`) and by `@`
and the scale dtype. The canonical name of a format omits what its base implies.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache

from smelt.errors import FormatError
from smelt.numerics.elements import E2M1, E2M3, E3M2, E4M3, E5M2, mx_integers, normal_floats, unsigned_integers
from smelt.numerics.format import PER_ROW, PER_TENSOR, Format
from smelt.numerics.integer import DenormalInteger, Integer
from smelt.numerics.scaled import Scaled, SignedScales, TensorScaled, Ternary, Unsigned

MX_BLOCK_SIZE = 32  # block size of the OCP formats
FORMATS: dict[str, Format] = {
    **{f"int{bits}": Integer(bits=bits) for bits in range(2, 9)},
    **{f"int{bits}-asym": Integer(bits=bits, symmetric=False) for bits in range(2, 9)},
    **{f"int{bits}-float-zero": Integer(bits=bits, symmetric=False, zero_dtype="float16") for bits in range(2, 9)},
    **{f"int{bits}-float32-zero": Integer(bits=bits, symmetric=False, zero_dtype="float32") for bits in range(2, 9)},
    **{f"int{bits}-wide": Integer(bits=bits, full_range=True) for bits in range(2, 9)},
    **{f"dint{bits}": DenormalInteger(bits=bits) for bits in range(3, 9)},
    **{f"dint{bits}-sym": DenormalInteger(bits=bits, symmetric=True) for bits in range(3, 9)},
    **{f"uint{bits}": Unsigned(elements=unsigned_integers(bits)) for bits in range(2, 9)},
    "fp8-e4m3": Scaled(elements=E4M3),
    "fp8-e5m2": Scaled(elements=E5M2),
    "fp4": Scaled(elements=E2M1),
    "mxfp4": Scaled(MX_BLOCK_SIZE, "e8m0", E2M1),
    "mxfp4-up": Scaled(MX_BLOCK_SIZE, "e8m0-up", E2M1),
    "mxfp6-e2m3": Scaled(MX_BLOCK_SIZE, "e8m0", E2M3),
    "mxfp6-e3m2": Scaled(MX_BLOCK_SIZE, "e8m0", E3M2),
    "mxfp8-e4m3": Scaled(MX_BLOCK_SIZE, "e8m0", E4M3),
    "mxfp8-e5m2": Scaled(MX_BLOCK_SIZE, "e8m0", E5M2),
    "mxint8": Scaled(MX_BLOCK_SIZE, "e8m0", mx_integers(8)),
    "mxint4": Scaled(MX_BLOCK_SIZE, "e8m0", mx_integers(4)),
    "nvfp4": TensorScaled(elements=E2M1),
    "amxfp4": SignedScales(MX_BLOCK_SIZE, "e5m2", E2M1),
    "nf4": Scaled(64, "float32", normal_floats(4)),
    "nf3": Scaled(64, "float32", normal_floats(3)),
    "nf2": Scaled(64, "float32", normal_floats(2)),
    "ternary": Ternary(),
}
_GROUP_NAMES = {"row": PER_ROW, "tensor": PER_TENSOR}


@lru_cache(maxsize=1024)  # layers ask for theirs in every forward pass
def get_format(name: str) -> Format:
    """Return the format with this name."""
    base_and_group, at, scale = name.partition("@")
    base, slash, group = base_and_group.partition("/")
    if base not in FORMATS:
        raise FormatError(f"there is no number format {base!r}; `smelt formats` lists them all.")
    number_format = FORMATS[base]
    if slash:
        if group not in _GROUP_NAMES and not (group.isdecimal() and int(group) > 0):
            raise FormatError(f"the group size in {name!r} must be a number, `row` or `tensor`.")
        number_format = replace(number_format, group_size=_GROUP_NAMES[group] if group in _GROUP_NAMES else int(group))
    if at:
        if scale not in number_format.scale_dtypes:
            raise FormatError(f"the scale dtype in {name!r} must be one of {', '.join(number_format.scale_dtypes)}.")
        number_format = replace(number_format, scale_dtype=scale)
    return number_format


def format_name(number_format: Format) -> str:
    """Return the canonical name: `get_format` is the inverse."""
    for base, candidate in FORMATS.items():
        if candidate == number_format:
            return base
    for base, candidate in FORMATS.items():
        if _signature(candidate) == _signature(number_format):
            group_names = {size: name for name, size in _GROUP_NAMES.items()}
            group = group_names.get(number_format.group_size, str(number_format.group_size))
            scale = f"@{number_format.scale_dtype}" if number_format.scale_dtype != candidate.scale_dtype else ""
            return base + (f"/{group}" if number_format.group_size != candidate.group_size else "") + scale
    raise FormatError(f"this format has no name: {number_format!r}.")


def _signature(number_format: Format) -> tuple[object, ...]:
    """Return the class and fields of a format, except group size and scale dtype."""
    others = (f.name for f in fields(number_format) if f.name not in ("group_size", "scale_dtype"))
    return type(number_format), *(getattr(number_format, name) for name in others)
