"""Integers: uniform steps between the smallest and the largest value, with or without a zero point; and dINT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.numerics.format import TENSOR, Format, Grid, finite, largest_of_all, magnitude
from smelt.numerics.scales import over, round_scale

ZeroType = Literal["code", "float16", "float32"]
_ZERO_BITS: dict[ZeroType, int] = {"code": 8, "float16": 16, "float32": 32}


@dataclass(frozen=True)
class Integer(Format):
    """b-bit integers. Codes are unsigned: `value = (code - zero) * scale`, zero in the middle where it is symmetric.

    `wide` spreads a symmetric range over all codes, scale = amax / (2^b - 1) * 2, as compressed-tensors does: the
    largest value may lose half a step. Otherwise scale = amax / (2^(b-1) - 1).
    """

    width: int = 4
    symmetric: bool = True
    wide: bool = False
    zero_type: ZeroType = "code"  # whole, as a code; or a fraction, stored in float16 or float32

    @property
    def bits(self) -> int:
        return self.width

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.width) - 1

    def check(self) -> None:
        super().check()
        if not 2 <= self.width <= 8:
            raise FormatError(f"integers have 2 to 8 bits, not {self.width}.")
        if self.symmetric and self.zero_type != "code":
            raise FormatError("symmetric integers store no zero point, so it has no type.")
        if self.wide and not self.symmetric:
            raise FormatError("wide is a way to place a symmetric range; leave it out with zero points.")

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        if self.symmetric:
            span = self.top / 2 if self.wide else self.top // 2
            largest = magnitude(x, self)
            scale = torch.where(largest == 0, 1.0, over(largest * shrink, span))
            return Grid(round_scale(scale, self.scale))
        low, high = extent(x, self)
        return self.grid_between(low * shrink, high * shrink)

    def grid_between(self, low: Tensor, high: Tensor) -> Grid:
        """The asymmetric grid from `low` (at most 0) to `high` (at least 0)."""
        scale = torch.where(high == low, 1.0, over(high - low, self.steps))
        scale = round_scale(scale, self.scale)
        zero = (-low / scale).round().clamp(0, self.steps)
        return Grid(scale, zero.nan_to_num(nan=0.0))  # the scale says NaN; a byte cannot

    @property
    def steps(self) -> int:
        """Between the smallest value and the largest."""
        return self.top

    def rounded_scale(self, scale: Tensor) -> Tensor:
        """As it will be stored."""
        return round_scale(scale, self.scale)

    def rounded_zero(self, zero: Tensor) -> Tensor:
        """As it will be stored."""
        if self.zero_type == "code":
            return zero.round().clamp(0, self.top)
        return zero.half().float() if self.zero_type == "float16" else zero.float()

    @property
    def grid_bits(self) -> int:
        return super().grid_bits + (0 if self.symmetric else _ZERO_BITS[self.zero_type])

    def _store(self, name: str, tensor: Tensor) -> Tensor:
        if name != "zero" or self.zero_type == "code":
            return super()._store(name, tensor)
        return tensor.half() if self.zero_type == "float16" else tensor.float()

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        zero = self.zero_of(grid)
        steps = x / grid.scale
        codes = steps.round() + zero if self.zero_type == "code" else (steps + zero).round()
        return codes.nan_to_num(nan=0.0).clamp(0, self.top).to(torch.uint8)

    def encode_stochastic(self, x: Tensor, grid: Grid, generator: torch.Generator | None = None) -> Tensor:
        steps = x / grid.scale + (self.zero_of(grid) if self.zero_type != "code" else 0.0)
        codes = up_or_down(steps, 1.0, generator) + (self.zero_of(grid) if self.zero_type == "code" else 0.0)
        return codes.nan_to_num(nan=0.0).clamp(0, self.top).to(torch.uint8)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        return (codes.float() - self.zero_of(grid)) * grid.scale

    def zero_of(self, grid: Grid) -> Tensor | float:
        return float(self.top // 2 + 1) if grid.zero is None else grid.zero


@dataclass(frozen=True)
class DenormalInteger(Integer):
    """dINT: two codes are spent on plus and minus half a step, where most weights lie (Lee et al., 2023).

    The card has this form from memory, marked so: the two codes near zero are certain, the exact code points are not.
    """

    symmetric: bool = False
    wide: ClassVar[bool] = False  # type: ignore[misc]

    @property
    def steps(self) -> int:
        return self.top - 2

    def check(self) -> None:
        super().check()
        if self.width < 3:
            raise FormatError("dint has 3 to 8 bits: two codes are spent near zero.")
        if self.zero_type != "code":
            raise FormatError("the zero point of dint is a code.")

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        if not self.symmetric:
            low, high = extent(x, self)
            return self.grid_between(low * shrink, high * shrink)
        largest = magnitude(x, self)
        return Grid(round_scale(torch.where(largest == 0, 1.0, over(largest * shrink, self.steps // 2)), self.scale))

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        return self._nearest(x / grid.scale, grid)

    def encode_stochastic(self, x: Tensor, grid: Grid, generator: torch.Generator | None = None) -> Tensor:
        steps = x / grid.scale
        grain = torch.where(steps.abs() < 1, 0.5, 1.0)
        return self._nearest(up_or_down(steps, grain, generator), grid)

    def _nearest(self, steps: Tensor, grid: Grid) -> Tensor:
        """Where there is no whole step on a side of zero, the half step is the end of the grid on that side."""
        zero = self.zero_of(grid)
        codes = (steps.round() + zero).nan_to_num(nan=0.0).clamp(0, self._last)
        codes = torch.where((steps >= 0.25) & ((steps < 0.75) | (zero >= self._last)), self.top - 1, codes)
        codes = torch.where((steps <= -0.25) & ((steps > -0.75) | (zero <= 0)), self.top, codes)
        return codes.to(torch.uint8)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        return self.doubled(codes, grid) * (grid.scale / 2)

    def doubled(self, codes: Tensor, grid: Grid) -> Tensor:
        """Whole numbers, twice the value in steps: what an int8 product takes, with half the scale."""
        plain = 2 * (codes.float() - self.zero_of(grid))
        return torch.where(codes == self.top - 1, 1.0, torch.where(codes == self.top, -1.0, plain))

    def zero_of(self, grid: Grid) -> Tensor | float:
        return float(self.steps // 2) if grid.zero is None else grid.zero

    @property
    def _last(self) -> int:
        """The largest ordinary code: a symmetric grid has as many steps below zero as above."""
        return 2 * (self.steps // 2) if self.symmetric else self.steps


def up_or_down(steps: Tensor, grain: Tensor | float, generator: torch.Generator | None) -> Tensor:
    """One of the two neighbouring multiples of the grain at random, the nearer the likelier."""
    low = (steps / grain).floor() * grain
    draw = torch.rand(steps.shape, generator=generator, device=steps.device, dtype=torch.float32)
    return torch.where(draw < (steps - low) / grain, low + grain, low)


def extent(x: Tensor, number_format: Format) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each group; zero always lies between them, so that it is exact."""
    kept = finite(x)
    low, high = kept.amin(-1, keepdim=True).clamp(max=0), kept.amax(-1, keepdim=True).clamp(min=0)
    if number_format.group == TENSOR:
        return -largest_of_all(-low), largest_of_all(high)
    return low, high
