"""Integers: uniform steps between the smallest and the largest value, with or without a zero point; and dINT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.numerics.format import TENSOR, Format, Grid, finite, magnitude
from smelt.numerics.scales import round_scale

ZeroType = Literal["code", "float16"]


@dataclass(frozen=True)
class Integer(Format):
    """b-bit integers. Codes are unsigned: `value = (code - zero) * scale`, zero in the middle where it is symmetric.

    `wide` spreads a symmetric range over all codes, scale = amax / (2^b - 1) * 2, as compressed-tensors does: the
    largest value may lose half a step. Otherwise scale = amax / (2^(b-1) - 1).
    """

    width: int = 4
    symmetric: bool = True
    wide: bool = False
    zero_type: ZeroType = "code"  # whole, as a code; or a fraction, stored in float16

    @property
    def bits(self) -> int:
        return self.width

    @property
    def holds_zero(self) -> bool:  # type: ignore[override]
        return not self.symmetric

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.width) - 1

    def check(self) -> None:
        super().check()
        if not 2 <= self.width <= 8:
            raise FormatError(f"integers have 2 to 8 bits, not {self.width}.")

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        if self.symmetric:
            span = self.top / 2 if self.wide else self.top // 2
            largest = magnitude(x, self)
            scale = torch.where(largest == 0, 1.0, largest * shrink / span)
            return Grid(round_scale(scale, self.scale))
        low, high = extent(x, self)
        return self.grid_between(low * shrink, high * shrink)

    def grid_between(self, low: Tensor, high: Tensor) -> Grid:
        """The asymmetric grid from `low` (at most 0) to `high` (at least 0)."""
        scale = torch.where(high == low, 1.0, (high - low) / self.steps)
        scale = round_scale(scale, self.scale)
        return Grid(scale, (-low / scale).round().clamp(0, self.steps))

    @property
    def steps(self) -> int:
        """Between the smallest value and the largest."""
        return self.top

    def rounded_scale(self, scale: Tensor) -> Tensor:
        """As it will be stored."""
        return round_scale(scale, self.scale)

    def rounded_zero(self, zero: Tensor) -> Tensor:
        """As it will be stored."""
        return zero.round().clamp(0, self.top) if self.zero_type == "code" else zero.half().float()

    @property
    def grid_bits(self) -> int:
        return super().grid_bits + (8 if self.zero_type == "float16" else 0)

    def _store(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.half() if name == "zero" and self.zero_type == "float16" else super()._store(name, tensor)

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        zero = self.zero_of(grid)
        steps = x / grid.scale
        codes = steps.round() + zero if self.zero_type == "code" else (steps + zero).round()
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

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        if not self.symmetric:
            low, high = extent(x, self)
            return self.grid_between(low * shrink, high * shrink)
        largest = magnitude(x, self)
        return Grid(round_scale(torch.where(largest == 0, 1.0, largest * shrink / (self.steps // 2)), self.scale))

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        steps = x / grid.scale
        codes = (steps.round() + self.zero_of(grid)).nan_to_num(nan=0.0).clamp(0, self._last)
        codes = torch.where((steps >= 0.25) & (steps < 0.75), self.top - 1, codes)
        codes = torch.where((steps <= -0.25) & (steps > -0.75), self.top, codes)
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


def extent(x: Tensor, number_format: Format) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each group; zero always lies between them, so that it is exact."""
    kept = finite(x)
    low, high = kept.amin(-1, keepdim=True).clamp(max=0), kept.amax(-1, keepdim=True).clamp(min=0)
    if number_format.group == TENSOR:
        return low.amin().expand(1, 1, 1), high.amax().expand(1, 1, 1)
    return low, high
