"""Elements times a shared scale: FP8, the OCP microscaling formats, NVFP4, AMXFP4, NormalFloat, ternary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.numerics.elements import E2M1, TERNARY, Elements
from smelt.numerics.format import TENSOR, Format, Grid, finite, largest_of_all, magnitude
from smelt.numerics.scales import POWERS, ROUNDED, ScaleType, over, power_of_two, round_scale


@dataclass(frozen=True)
class Scaled(Format):
    """Every group has one scale, chosen so that its largest magnitude meets the largest element."""

    elements: Elements = E2M1

    scale_types: ClassVar[tuple[ScaleType, ...]] = ROUNDED + POWERS

    @property
    def bits(self) -> int:
        return self.elements.bits

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        return Grid(self.scale_for(magnitude(x, self) * shrink))

    def scale_for(self, largest: Tensor) -> Tensor:
        if self.scale in POWERS:
            scale = power_of_two(largest, self.scale, math.floor(math.log2(self.elements.largest)))
        else:
            scale = round_scale(over(largest, self.elements.largest), self.scale)
        return torch.where(largest == 0, 1.0, scale)

    def scale_of(self, x: Tensor, grid: Grid) -> Tensor:
        """By what each value is divided. The values may be true or rounded ones: only their signs can matter."""
        return grid.scale

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        return self.elements.encode(self._scaled(x, grid))

    def encode_stochastic(self, x: Tensor, grid: Grid, generator: torch.Generator | None = None) -> Tensor:
        return self.elements.encode_stochastic(self._scaled(x, grid), generator)

    def _scaled(self, x: Tensor, grid: Grid) -> Tensor:
        return (x / self.scale_of(x, grid)).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        values = self.elements.decode(codes)
        return values * self.scale_of(values, grid)


@dataclass(frozen=True)
class SignedScales(Scaled):
    """AMXFP4: positive and negative elements of a group have a scale each; the element's own sign tells which."""

    @property
    def grid_bits(self) -> int:
        return 2 * super().grid_bits

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        positive = self.scale_for(magnitude(x.clamp(min=0), self) * shrink)
        return Grid(positive, negative=self.scale_for(magnitude(x.clamp(max=0), self) * shrink))

    def scale_of(self, x: Tensor, grid: Grid) -> Tensor:
        assert grid.negative is not None
        return torch.where(x > 0, grid.scale, grid.negative)


@dataclass(frozen=True)
class TensorScaled(Scaled):
    """NVFP4: the scales of the groups are themselves scaled, by one number, to use the whole range of E4M3."""

    group: int = 16
    scale: ScaleType = "e4m3"

    scale_types: ClassVar[tuple[ScaleType, ...]] = ("e4m3",)

    @property
    def tensor_bits(self) -> int:
        return 32

    def whole(self, x: Tensor) -> Tensor:
        """The largest magnitude. A NaN is its group's concern, and must not reach the others through this number."""
        return largest_of_all(finite(x.float()).nan_to_num(nan=0.0).abs())

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        largest = self.whole(x) if whole is None else whole
        reach = 448.0 * self.elements.largest
        tensor = round_scale(torch.where(largest == 0, 1.0, reach / largest), "float32").reshape([1] * x.dim())
        stored = round_scale(over(magnitude(x, self) * shrink * tensor, self.elements.largest), self.scale)
        return Grid(stored, tensor=tensor)

    def scale_of(self, x: Tensor, grid: Grid) -> Tensor:
        assert grid.tensor is not None
        return grid.scale / grid.tensor


@dataclass(frozen=True)
class Ternary(Scaled):
    """Minus one, zero, one, times the mean magnitude of a group (Ma et al., 2024).

    Zeros are left out of the mean: it then does not depend on how a short group is filled up, and weights that are
    ternary already stay what they are.
    """

    elements: Elements = TERNARY

    scale_types: ClassVar[tuple[ScaleType, ...]] = ROUNDED

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        kept = finite(x).abs()
        total, held = kept.sum(-1, keepdim=True), (kept > 0).sum(-1, keepdim=True)
        if self.group == TENSOR:
            total, held = (part.sum().reshape([1] * x.dim()) for part in (total, held))
        mean = total / held.clamp(min=1)
        return Grid(torch.where(mean == 0, 1.0, round_scale(mean * shrink, self.scale)))
