"""Floating-point formats with any number of exponent and mantissa bits, emulated exactly in float32 or float64.

A format is the grid of its values; `round` maps real numbers to it: to nearest with ties to even, stochastically, or by
truncation. `smelt.numerics.elements` tabulates the 8-bit ones and smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from smelt.errors import FormatError

Rounding = Literal["nearest", "stochastic", "truncate"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic", "truncate")
SpecialCodes = Literal["none", "nan", "ieee"]
# The float types in which values are rounded: the integer type of their bits, mantissa bits and bias.
_LAYOUTS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


@dataclass(frozen=True)
class FloatFormat:
    """A float of one sign bit, `exponent_bits` and `mantissa_bits`, the hidden bit not counted.

    Without subnormals, exponent code 0 belongs to normal numbers except for code 0, which is zero (as in DLFloat16).
    Values must be exact in float32: at most 8 exponent and 23 mantissa bits.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None  # default: 2^(exponent_bits - 1) - 1
    special: SpecialCodes = "ieee"  # none: all codes are finite; nan: only all ones is not; ieee: infinities and NaN
    subnormals: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.exponent_bits <= 8 or not 1 <= self.mantissa_bits <= 23:
            raise FormatError(
                f"a float format has 2 to 8 exponent and 1 to 23 mantissa bits, not {self.exponent_bits} and "
                f"{self.mantissa_bits}."
            )
        smallest = self.min_exponent - (self.mantissa_bits if self.subnormals else 0)
        if smallest < -149 or self.max_value >= 2.0**128:
            raise FormatError(
                f"the bias {self.exponent_bias} puts values out of the range of float32; use another one."
            )

    @property
    def exponent_bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1 if self.bias is None else self.bias

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest binade; subnormals have its spacing."""
        return (1 if self.subnormals else 0) - self.exponent_bias

    @cached_property
    def max_value(self) -> float:
        """The largest finite value."""
        code = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        while math.isnan(value := self.value(code)):
            code = ((code >> self.mantissa_bits) << self.mantissa_bits) - 1 if self.special == "ieee" else code - 1
        return value

    @property
    def min_positive(self) -> float:
        """The smallest positive value."""
        return self.value(1)

    def value(self, code: int) -> float:
        """Return the value of a code without its sign bit; NaN for those of infinity and NaN."""
        top = (1 << self.exponent_bits) - 1
        power, fraction = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if self.special == "ieee" and power == top:
            return math.nan
        if self.special == "nan" and code == (1 << (self.exponent_bits + self.mantissa_bits)) - 1:
            return math.nan
        if code == 0:
            return 0.0
        if power == 0 and self.subnormals:
            return math.ldexp(fraction, self.min_exponent - self.mantissa_bits)
        return math.ldexp((1 << self.mantissa_bits) + fraction, power - self.exponent_bias - self.mantissa_bits)

    @property
    def overflow_value(self) -> float:
        """What a value beyond the largest one becomes if it is not saturated."""
        return {"none": self.max_value, "nan": math.nan, "ieee": math.inf}[self.special]

    def round(
        self,
        x: Tensor,
        rounding: Rounding = "nearest",
        *,
        saturate: bool = True,
        generator: torch.Generator | None = None,
        uniform: Tensor | None = None,
    ) -> Tensor:
        """Round values to this format, in float32 (float64 stays float64).

        Values out of range become the largest one, or without `saturate` infinity (NaN where the format has no
        infinity); truncation overflows to the largest one. NaN stays NaN. Stochastic rounding goes up with a
        probability equal to the distance to the lower neighbor: `uniform` in [0, 1), of the shape of x, decides; it is
        drawn with `generator` if not given.
        """
        check_rounding(rounding)
        fits_float32 = -126 <= self.min_exponent - self.mantissa_bits <= 0  # so do all steps and scaled values
        values = x.float() if fits_float32 and x.dtype != torch.float64 else x.double()
        if rounding == "stochastic" and uniform is None:
            uniform = torch.rand(x.shape, generator=generator, device=x.device, dtype=values.dtype)
        rounded = self._round(values, rounding, saturate, uniform)
        return rounded if x.dtype == torch.float64 else rounded.float()

    def _round(self, x: Tensor, rounding: Rounding, saturate: bool, uniform: Tensor | None) -> Tensor:
        magnitude = x.abs()
        integers, mantissa, bias = _LAYOUTS[x.dtype]
        exponent = (magnitude.view(integers) >> mantissa) - bias  # of zero and subnormals -bias, of infinity bias + 1
        power = exponent.clamp(self.min_exponent, bias) - self.mantissa_bits
        step = ((power + bias) << mantissa).view(x.dtype)  # 2^power, exactly: not every device computes powers so
        steps = magnitude / step  # exact: the divisor is a power of two
        if uniform is not None:
            low = steps.floor()
            result = (low + (uniform < steps - low)) * step
        else:
            result = (steps.round() if rounding == "nearest" else steps.trunc()) * step
        if not self.subnormals:
            result = torch.where(magnitude < self.min_positive, self._round_tiny(magnitude, rounding, uniform), result)
        result = torch.where(result > self.max_value, self._overflow(magnitude, rounding, saturate), result)
        return result.copysign(x)

    def _round_tiny(self, magnitude: Tensor, rounding: Rounding, uniform: Tensor | None) -> Tensor:
        """Round magnitudes between zero and the smallest value to one of them; the tie goes to zero, the even code."""
        if rounding == "truncate":
            return torch.zeros_like(magnitude)
        threshold = 0.5 if uniform is None else uniform
        return torch.where(magnitude > threshold * self.min_positive, self.min_positive, 0.0).to(magnitude.dtype)

    def _overflow(self, magnitude: Tensor, rounding: Rounding, saturate: bool) -> Tensor:
        value = torch.full_like(magnitude, self.max_value if saturate else self.overflow_value)
        if rounding == "truncate":  # a finite value never becomes infinite
            value = torch.where(magnitude.isinf(), value, self.max_value)
        return value


def check_rounding(rounding: str) -> None:
    if rounding not in ROUNDINGS:
        raise FormatError(f"there is no rounding {rounding!r}; use {', '.join(ROUNDINGS[:-1])} or {ROUNDINGS[-1]}.")


FP8_E4M3 = FloatFormat(4, 3, special="nan")  # OCP, to 448
FP8_E5M2 = FloatFormat(5, 2)  # OCP, to 57344
FP8_E5M2_IBM = FloatFormat(5, 2, special="nan")  # (1,5,2) of Wang et al., 2018: the top exponent has numbers, to 98304
DLFLOAT16 = FloatFormat(6, 9, special="nan", subnormals=False)  # (1,6,9) of Agrawal et al., 2019
FLOAT16 = FloatFormat(5, 10)
BFLOAT16 = FloatFormat(8, 7)
