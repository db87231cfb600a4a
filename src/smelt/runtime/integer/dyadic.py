"""Dyadic numbers: a positive ratio of scales as an integer multiplier and a right shift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.errors import ConversionError

MAX_SHIFT = 62


@dataclass(frozen=True)
class Dyadic:
    """The number `multiplier / 2**shift`, with a multiplier of 31 bits."""

    multiplier: int
    shift: int

    @classmethod
    def of(cls, ratio: float, layer: str) -> Dyadic:
        """Return the nearest dyadic number with a 31-bit multiplier; `layer` is named if there is none."""
        if not (math.isfinite(ratio) and ratio > 0):
            raise ConversionError(f"{layer}: the ratio of two scales is {ratio}; it must be positive and finite.")
        mantissa, exponent = math.frexp(ratio)
        multiplier, shift = math.floor(mantissa * 2**31 + 0.5), 31 - exponent
        if multiplier == 2**31:
            multiplier, shift = 2**30, shift - 1
        if not 0 <= shift <= MAX_SHIFT:
            raise ConversionError(
                f"{layer}: the ratio {ratio:.3g} of its scales needs a shift of {shift}, outside 0 to {MAX_SHIFT}; "
                "check its calibration data and weights for extreme values."
            )
        return cls(multiplier, shift)


def dyadic_tensors(ratios: Sequence[float], layer: str) -> tuple[Tensor, Tensor]:
    """Return multipliers and shifts of one or more ratios as int32 tensors."""
    numbers = [Dyadic.of(ratio, layer) for ratio in ratios]
    multipliers = torch.tensor([number.multiplier for number in numbers], dtype=torch.int32)
    return multipliers, torch.tensor([number.shift for number in numbers], dtype=torch.int32)
