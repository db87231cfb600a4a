"""LSQ: step sizes are learned by gradient descent (Esser et al., 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from smelt.compression.distillation.quantizers.base import (
    ACTIVATION_QUANTIZERS,
    WEIGHT_QUANTIZERS,
    ActivationQuantizer,
    Learned,
    NamedFormatQuantizer,
    check_bits,
    round_through,
)
from smelt.errors import RecipeError
from smelt.numerics.format import QuantParams
from smelt.numerics.integer import Integer
from smelt.numerics.scaled import Ternary

_MIN_SCALE = 1e-8


@WEIGHT_QUANTIZERS.register("lsq", paper="Esser et al., 2020 (LSQ, arXiv 1902.08153)")
@dataclass(frozen=True)
class Lsq(NamedFormatQuantizer):
    """Learn the scale of each group of weights, of symmetric integers or ternary weights."""

    weight_format: str = "int2/64"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer = type(self.format) is Integer and self.format.symmetric
        if not integer and not isinstance(self.format, Ternary):
            raise RecipeError(
                f"lsq learns the scales of symmetric integers or ternary weights, not {self.weight_format}."
            )

    @property
    def levels(self) -> tuple[int, int]:
        """The smallest and the largest level, in steps."""
        if isinstance(self.format, Ternary):
            return -1, 1
        return -(2 ** (self.format.bits - 1)), 2 ** (self.format.bits - 1) - 1

    def init(self, weight: Tensor) -> Learned:
        groups = self.format.split_groups(weight.detach())
        scale = 2 * groups.abs().mean(-1, keepdim=True) / math.sqrt(self.levels[1])
        return {"scale": scale.mean(dim=(0, 1), keepdim=True) if self.format.group_size == 0 else scale}

    def qparams(self, groups: Tensor, learned: Learned) -> QuantParams:
        scale = learned["scale"].abs().clamp(min=_MIN_SCALE)
        stored = self.format.round_scale(scale) if isinstance(self.format, Integer) else scale
        return QuantParams(stored)

    def pass_gradient(self, groups: Tensor, values: Tensor, qparams: QuantParams) -> Tensor:
        scale = _scale_gradient(qparams.scale, groups.numel() // qparams.scale.numel(), self.levels[1])
        return round_through((groups / scale).clamp(*self.levels)) * scale


@ACTIVATION_QUANTIZERS.register("lsq", paper="Esser et al., 2020 (LSQ, arXiv 1902.08153)")
@dataclass(frozen=True)
class LsqActivations(ActivationQuantizer):
    """Learn the scale of the inputs of each layer."""

    bits: int = 4
    signed: bool = False

    def __post_init__(self) -> None:
        check_bits("lsq", self.bits)

    def init(self, x: Tensor) -> Learned:
        scale = 2 * x.detach().float().abs().mean() / math.sqrt(self.levels(self.bits)[1])
        return {"scale": scale.clamp(min=1e-6)}

    def scale(self, bits: int, learned: Learned) -> Tensor:
        """Keep the clipping level when the bits differ."""
        own, other = self.levels(self.bits)[1], self.levels(bits)[1]
        return learned["scale"].abs().clamp(min=_MIN_SCALE) * (own / other)

    def fake_quantize(self, x: Tensor, bits: int, learned: Learned) -> Tensor:
        low, high = self.levels(bits)
        scale = _scale_gradient(self.scale(bits, learned), x.numel(), high)
        return round_through((x / scale).clamp(low, high)) * scale


def _scale_gradient(scale: Tensor, count: int, high: int) -> Tensor:
    """Return the scale with its gradient divided by sqrt(count * high), so that it changes as fast as the weights."""
    factor = 1 / math.sqrt(count * high)
    return (scale - scale * factor).detach() + scale * factor
