"""Element types: the values that codes represent before scaling.

An element type is a table: `values[code]` is the value of a code. Rounding is to nearest, ties to the even code, as
IEEE 754 and the OCP formats require; values out of range saturate. Unused codes and codes of infinity and NaN map to
NaN: nothing is rounded to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from smelt.numerics.float_format import FP8_E4M3, FP8_E5M2, FloatFormat

NAN = float("nan")


@dataclass(frozen=True)
class ElementType:
    """A table of at most 256 values, one per code. Compared by name, since NaN in a table never compares equal."""

    name: str
    bits: int
    values: tuple[float, ...] = field(compare=False)

    @cached_property
    def max_value(self) -> float:
        """The largest value: a scale maps the largest magnitude of a group to it."""
        return max(value for value in self.values if not math.isnan(value))

    @cached_property
    def min_value(self) -> float:
        return min(value for value in self.values if not math.isnan(value))

    def encode(self, x: Tensor) -> Tensor:  # any shape -> uint8 of that shape
        """Return the code of the nearest value. NaN has no code: it must be carried by the scale of its group."""
        boundaries, codes = _search_tables(self, x.device)
        return codes[torch.bucketize(x.float().contiguous(), boundaries, right=True)]

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return _values(self, codes.device, dtype)[codes.long()]

    def encode_stochastic(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Round stochastically to one of the two neighboring values, such that the expectation is the input."""
        levels, codes = _levels(self, x.device)
        x = x.float().clamp(self.min_value, self.max_value).contiguous()
        low = (torch.bucketize(x, levels, right=True) - 1).clamp(0, len(levels) - 2)
        probability_up = (x - levels[low]) / (levels[low + 1] - levels[low])
        uniform = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float32)
        return codes[low + (uniform < probability_up).long()]


@lru_cache(maxsize=256)
def _values(elements: ElementType, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(elements.values, device=device, dtype=dtype)


@lru_cache(maxsize=256)
def _levels(elements: ElementType, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values in ascending order and their codes. Of two zeros, the positive one is used."""
    code_of: dict[float, int] = {}
    for code, value in enumerate(elements.values):
        if not math.isnan(value):
            code_of.setdefault(value + 0.0, code)
    ordered = sorted(code_of.items())
    levels = torch.tensor([value for value, _ in ordered], device=device, dtype=torch.float32)
    return levels, torch.tensor([code for _, code in ordered], device=device, dtype=torch.uint8)


@lru_cache(maxsize=256)
def _search_tables(elements: ElementType, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return boundaries such that x >= boundary rounds up: the first float32 that is nearer to the upper level. Ties go
    to the even code: if that is the lower one, the boundary is the next float32 above the midpoint."""
    levels, codes = _levels(elements, torch.device("cpu"))
    midpoint = (levels[1:].double() + levels[:-1].double()) / 2  # exact
    boundary = midpoint.float()
    lower_is_even = codes[:-1] % 2 == 0
    rounds_down = (boundary < midpoint) | ((boundary == midpoint) & lower_is_even)
    above = torch.nextafter(boundary, torch.full_like(boundary, math.inf))
    return torch.where(rounds_down, above, boundary).to(device), codes.to(device)


def minifloat(name: str, float_format: FloatFormat) -> ElementType:
    """Return the table of a small float: positive codes, then negative ones."""
    magnitude_bits = float_format.exponent_bits + float_format.mantissa_bits
    values = tuple(float_format.value(code) for code in range(1 << magnitude_bits))
    return ElementType(name, 1 + magnitude_bits, values + tuple(-value for value in values))


def mx_integers(bits: int) -> ElementType:
    """Return fixed-point numbers with all but two bits behind the point, as in MXINT8. Codes ascend with values; the
    lowest value is left out, so that the range is symmetric."""
    half = 1 << (bits - 1)
    values = [2.0 ** (2 - bits) * (code - half) for code in range(2 * half)]
    return ElementType(f"int{bits}", bits, (NAN, *values[1:]))


def unsigned_integers(bits: int) -> ElementType:
    """Return the integers from 0 to 2^bits - 1, each its own code, for activations after a ReLU."""
    return ElementType(f"uint{bits}", bits, tuple(float(code) for code in range(1 << bits)))


def normal_floats(bits: int) -> ElementType:
    """Return NormalFloat: normal quantiles with an exact zero, scaled to [-1, 1] (Dettmers et al., 2023)."""
    offset, half = 0.9677083, 1 << (bits - 1)

    def quantiles(count: int) -> list[float]:
        return [NormalDist().inv_cdf(offset + (0.5 - offset) * index / count) for index in range(count)]

    positive, negative = quantiles(half), [-value for value in quantiles(half - 1)]
    max_value = max(positive)
    return ElementType(f"nf{bits}", bits, tuple(sorted(value / max_value for value in [*positive, 0.0, *negative])))


E2M1 = minifloat("e2m1", FloatFormat(2, 1, special="none"))
E2M3 = minifloat("e2m3", FloatFormat(2, 3, special="none"))
E3M2 = minifloat("e3m2", FloatFormat(3, 2, special="none"))
E4M3 = minifloat("e4m3", FP8_E4M3)
E5M2 = minifloat("e5m2", FP8_E5M2)
TERNARY = ElementType("ternary", 2, (-1.0, 0.0, 1.0, NAN))
