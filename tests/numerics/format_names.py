"""The formats these tests cover: every base, and group sizes and scales beyond the defaults."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.numerics import FORMATS, Format, QuantParams
from smelt.numerics.integer import DenormalInteger

VARIANTS = (
    "int4/5", "int4/tensor", "int8/tensor@bfloat16", "int3-asym/7@float16", "int4-asym/tensor@e5m2", "dint4/8@float16",
    "dint4/tensor", "int4-float-zero/16@float16", "int4-float32-zero/32@float16", "fp8-e4m3/tensor", "fp4/32@e4m3",
    "mxfp4/row", "mxfp4/tensor",
    "amxfp4@e8m0", "amxfp4/tensor@e4m3", "nvfp4/tensor", "nvfp4/5", "nf4/7@bfloat16", "ternary/tensor", "ternary/3",
)  # fmt: skip
NAMES = [*FORMATS, *VARIANTS]


def every_value(number_format: Format, grid: QuantParams) -> Tensor:  # [..., groups, codes]
    """Return the value of each code in each group; NaN for unused codes."""
    codes = torch.arange(1 << number_format.bits, dtype=torch.uint8)
    values = number_format.dequantize_groups(codes.expand(*grid.scale.shape[:-1], -1), grid)
    if isinstance(number_format, DenormalInteger) and number_format.symmetric:
        values[..., -3] = torch.nan  # the unused code
    return values
