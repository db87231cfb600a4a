"""LSQ: step sizes are learned by gradient descent (Esser et al., 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.compression.base import one_of
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
from smelt.numerics.format import PER_TENSOR, QuantParams, group_amax
from smelt.numerics.gradient import straight_through
from smelt.numerics.integer import Integer
from smelt.numerics.scaled import Ternary

_MIN_SCALE = 1e-8
_CLIP_STEP = 2  # percent of the largest magnitude, in the search for the least squared error


@WEIGHT_QUANTIZERS.register(
    "lsq", paper="Esser et al., 2020 (LSQ, arXiv 1902.08153); Bhalgat et al., 2020 (LSQ+, arXiv 2004.09576)"
)
@dataclass(frozen=True)
class Lsq(NamedFormatQuantizer):
    """Learn the scale of each group of weights: of integers, symmetric or with a float zero point, or ternary weights.

    A float zero point (LSQ+) is learned, too. It starts between two levels, so that as many are above zero as below:
    with 2 bits plus and minus a half and one and a half steps, as in ParetoQ (Liu et al., 2025, arXiv 2502.02631).
    """

    weight_format: str = "int2/64"
    scale_init: str = "mean"  # 2 E|w| / sqrt(largest level), as published; or mse: of the least squared error

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("lsq", "scale_init", self.scale_init, ("mean", "mse"))
        number_format = self.format
        integer = type(number_format) is Integer and (number_format.symmetric or self._has_float_zero)
        if not integer and not isinstance(number_format, Ternary):
            raise RecipeError(
                "lsq learns the scales of symmetric integers or ternary weights, or scales and zero points of integers "
                f"such as int2-float-zero, not {self.weight_format}."
            )

    @property
    def _has_float_zero(self) -> bool:
        return isinstance(self.format, Integer) and not self.format.symmetric and self.format.zero_dtype != "code"

    @property
    def levels(self) -> tuple[float, float]:
        """The smallest and the largest level, in steps; with a zero point, at its start."""
        if isinstance(self.format, Ternary):
            return -1, 1
        if self._has_float_zero:
            return -(2**self.format.bits - 1) / 2, (2**self.format.bits - 1) / 2
        return -(2 ** (self.format.bits - 1)), 2 ** (self.format.bits - 1) - 1

    def init(self, weight: Tensor) -> Learned:
        groups = self.format.split_groups(weight.detach())
        scale = 2 * groups.abs().mean(-1, keepdim=True) / math.sqrt(self.levels[1])
        if self.format.group_size == PER_TENSOR:
            scale = scale.mean(dim=(0, 1), keepdim=True)
        learned = {"scale": scale.clamp(min=_MIN_SCALE)}
        if self._has_float_zero:
            learned["zero"] = torch.full_like(scale, self.levels[1])
        return learned if self.scale_init == "mean" else self._least_squares(groups, learned)

    def _least_squares(self, groups: Tensor, learned: Learned) -> Learned:
        """Return what is learned with the scales of the least squared error, of those up to the largest magnitude."""
        largest = group_amax(groups, self.format).clamp(min=_MIN_SCALE) / self.levels[1]
        best, least = learned, torch.full_like(largest, math.inf)
        for percent in range(_CLIP_STEP, 101, _CLIP_STEP):
            tried = {**learned, "scale": largest * (percent / 100)}
            qparams = self.qparams(groups, tried)
            values = self.format.dequantize_groups(self.encode(groups, qparams), qparams)
            error = (values - groups).square().sum(-1, keepdim=True)
            error = error if error.shape == least.shape else error.sum().expand_as(least)
            best = {**learned, "scale": torch.where(error < least, tried["scale"], best["scale"])}
            least = torch.minimum(error, least)
        return best

    def qparams(self, groups: Tensor, learned: Learned) -> QuantParams:
        scale = learned["scale"].abs().clamp(min=_MIN_SCALE)
        if not isinstance(self.format, Integer):
            return QuantParams(scale)
        zero = learned.get("zero")
        rounded = None if zero is None else straight_through(zero, self.format.round_zero(zero.detach()))
        return QuantParams(self.format.round_scale(scale), rounded)

    def fake_quantize(self, weight: Tensor, learned: Learned) -> Tensor:
        # Without the codes: the gradient's formula gives the same values, and every pass over the weights counts.
        groups = self.format.split_groups(weight)
        return self._join(self.pass_gradient(groups, groups, self.qparams(groups, learned)), weight)

    def pass_gradient(self, groups: Tensor, values: Tensor, qparams: QuantParams) -> Tensor:
        count = groups.numel() // qparams.scale.numel()
        scale = _scale_gradient(qparams.scale, count, self.levels[1])
        if qparams.zero is None:
            return round_through((groups / scale).clamp(*self.levels)) * scale
        zero = _scale_gradient(qparams.zero, count, self.levels[1])
        return (round_through((groups / scale + zero).clamp(0, 2**self.format.bits - 1)) - zero) * scale


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


def _scale_gradient(scale: Tensor, count: int, high: float) -> Tensor:
    """Return a scale or zero point with its gradient divided by sqrt(count * high): it changes as fast as weights."""
    factor = 1 / math.sqrt(count * high)
    return (scale - scale * factor).detach() + scale * factor
