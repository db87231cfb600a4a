"""SAWB: the clipping level of weights in closed form from two moments (Choi et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from smelt.compression.base import one_of
from smelt.compression.distillation.quantizers.base import WEIGHT_QUANTIZERS, Learned, WeightQuantizer
from smelt.errors import RecipeError
from smelt.numerics.catalog import get_format
from smelt.numerics.format import PER_ROW, PER_TENSOR, Format, QuantParams
from smelt.numerics.gradient import straight_through
from smelt.numerics.integer import Integer

# alpha = c1 sqrt(E[w^2]) + c2 E|w|, by bits and whether zero is a level. `benchmarks/sawb_constants.py` refits them.
CONSTANTS: dict[tuple[int, bool], tuple[float, float]] = {
    (2, False): (3.12, -2.064),  # -a, -a/3, a/3, a
    (2, True): (2.6, -1.71),  # -a, 0, a
    (3, False): (7.509, -6.892),
    (4, False): (12.68, -12.80),
    (4, True): (12.035, -12.03),
    (5, False): (17.74, -18.64),
    (7, True): (28.24, -30.81),
    (8, True): (31.76, -35.04),
}


def clipping_level(weight: Tensor, bits: int, zero: bool, *, per_channel: bool = False) -> Tensor:
    """Return alpha of a weight [out, ...], as [1, 1, 1], or per channel as [out, 1, 1].

    Where the formula is not positive, as for 8 bits and weights of almost equal magnitude, it is the largest magnitude.
    """
    c1, c2 = CONSTANTS[bits, zero]
    rows = weight.detach().float().flatten(1) if per_channel else weight.detach().float().reshape(1, -1)
    alpha = c1 * rows.square().mean(-1).sqrt() + c2 * rows.abs().mean(-1)
    return torch.where(alpha > 0, alpha, rows.abs().amax(-1)).clamp(min=1e-12).reshape(-1, 1, 1)


@WEIGHT_QUANTIZERS.register("sawb", paper="Choi et al., 2019 (SAWB, arXiv 1807.06964)")
@dataclass(frozen=True)
class Sawb(WeightQuantizer):
    """Clip weights near the level of least squared error, which two moments of the weights give without a search."""

    bits: int = 2
    zero: bool = False  # whether zero is a level: one level fewer; true with 2 bits: ternary
    granularity: str = "tensor"  # or channel
    gradient: str = "plus"  # plus (SAWB+): of all weights; clip: zero for weights that are clipped

    def __post_init__(self) -> None:
        if (self.bits, self.zero) not in CONSTANTS:
            known = ", ".join(f"{bits} {'with' if zero else 'without'} zero" for bits, zero in CONSTANTS)
            raise RecipeError(f"sawb has constants for these bits: {known}; use lsq for others.")
        one_of("sawb", "granularity", self.granularity, ("tensor", "channel"))
        one_of("sawb", "gradient", self.gradient, ("plus", "clip"))

    @cached_property
    def format(self) -> Format:
        group_size = PER_TENSOR if self.granularity == "tensor" else PER_ROW
        if (self.bits, self.zero) == (2, True):
            return get_format("ternary").with_group_size(group_size)
        return Integer(group_size, "float32", self.bits, self.zero, zero_dtype="code" if self.zero else "float32")

    def qparams(self, groups: Tensor, learned: Learned) -> QuantParams:
        alpha = clipping_level(groups, self.bits, self.zero, per_channel=self.granularity == "channel")
        if self.zero:
            return QuantParams(alpha / (2 ** (self.bits - 1) - 1))
        levels = 2**self.bits - 1
        return QuantParams(2 * alpha / levels, torch.full_like(alpha, levels / 2))

    def encode(self, groups: Tensor, qparams: QuantParams) -> Tensor:
        alpha = self._alpha(qparams)
        return super().encode(groups.clamp(-alpha, alpha), qparams)

    def pass_gradient(self, groups: Tensor, values: Tensor, qparams: QuantParams) -> Tensor:
        alpha = self._alpha(qparams)
        return straight_through(groups.clamp(-alpha, alpha) if self.gradient == "clip" else groups, values)

    def _alpha(self, qparams: QuantParams) -> Tensor:
        return qparams.scale * (2 ** (self.bits - 1) - 1 if self.zero else (2**self.bits - 1) / 2)
