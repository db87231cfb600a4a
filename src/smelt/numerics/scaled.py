"""Elements times a shared scale: FP8, the OCP microscaling formats, NVFP4, AMXFP4, NormalFloat, ternary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.numerics.elements import E2M1, TERNARY, Elements
from smelt.numerics.format import TENSOR, Format, Grid, finite, magnitude
from smelt.numerics.scales import STORED_BITS, ScaleType, power_of_two, round_scale


@dataclass(frozen=True)
class Scaled(Format):
    """Every group has one scale, chosen so that its largest magnitude meets the largest element."""

    elements: Elements = E2M1

    @property
    def bits(self) -> int:
        return self.elements.bits

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        return Grid(self.scale_for(magnitude(x, self) * shrink))

    def scale_for(self, largest: Tensor) -> Tensor:
        if self.scale in ("e8m0", "e8m0-up"):
            scale = power_of_two(largest, self.scale, math.floor(math.log2(self.elements.largest)))
        else:
            scale = round_scale(largest / self.elements.largest, self.scale)
        return torch.where(largest == 0, 1.0, scale)

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        return self.elements.encode((x / grid.scale).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        return self.elements.decode(codes) * grid.scale


@dataclass(frozen=True)
class SignedScales(Scaled):
    """AMXFP4: positive and negative elements of a group have a scale each; the element's own sign tells which."""

    @property
    def grid_bits(self) -> int:
        return 2 * STORED_BITS[self.scale]

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        positive = self.scale_for(magnitude(x.clamp(min=0), self) * shrink)
        return Grid(positive, negative=self.scale_for(magnitude(x.clamp(max=0), self) * shrink))

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        assert grid.negative is not None
        return super().encode(x, Grid(torch.where(x > 0, grid.scale, grid.negative)))

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        assert grid.negative is not None
        values = self.elements.decode(codes)
        return values * torch.where(values > 0, grid.scale, grid.negative)


@dataclass(frozen=True)
class TensorScaled(Scaled):
    """NVFP4: the scales of the groups are themselves scaled, by one number, to use the whole range of E4M3."""

    group: int = 16
    scale: ScaleType = "e4m3"

    def whole(self, x: Tensor) -> Tensor:
        return finite(x.float()).abs().amax() if x.numel() else torch.zeros((), device=x.device)

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        largest = self.whole(x) if whole is None else whole
        reach = 448.0 * self.elements.largest
        tensor = torch.where(largest == 0, 1.0, reach / largest).reshape(1, 1, 1)
        stored = round_scale(magnitude(x, self) * shrink * tensor / self.elements.largest, "e4m3")
        return Grid(stored, tensor=tensor)

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        return super().encode(x, Grid(self._effective(grid)))

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        return self.elements.decode(codes) * self._effective(grid)

    @staticmethod
    def _effective(grid: Grid) -> Tensor:
        assert grid.tensor is not None
        return grid.scale / grid.tensor


@dataclass(frozen=True)
class Ternary(Scaled):
    """Minus one, zero, one, times the mean magnitude of the group's values that are not zero (Ma et al., 2024)."""

    elements: Elements = TERNARY

    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        kept = finite(x).abs()
        total, held = kept.sum(-1, keepdim=True), (kept > 0).sum(-1, keepdim=True)
        if self.group == TENSOR:
            total, held = total.sum().expand(1, 1, 1), held.sum().expand(1, 1, 1)
        mean = total / held.clamp(min=1)
        return Grid(torch.where(mean == 0, 1.0, round_scale(mean * shrink, self.scale)))
