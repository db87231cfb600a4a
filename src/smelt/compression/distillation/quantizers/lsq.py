"""LSQ: step sizes are learned by gradient descent (Esser et al., 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
)
from smelt.errors import RecipeError
from smelt.numerics.format import PER_TENSOR, QuantParams, group_amax
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
        return QuantParams(self.format.round_scale(scale), None if zero is None else self.format.round_zero(zero))

    def fake_quantize(self, weight: Tensor, learned: Learned) -> Tensor:
        # Without the codes: the gradient's formula gives the same values, and every pass over the weights counts.
        groups = self.format.split_groups(weight)
        with torch.no_grad():
            qparams = self.qparams(groups, learned)
        levels = self.levels if qparams.zero is None else (0, 2**self.format.bits - 1)
        return self._join(learned_grid(groups, learned, qparams, levels, gradient_level=self.levels[1]), weight)


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
        scale = self.scale(bits, learned)
        return learned_grid(x, {"scale": scale}, QuantParams(scale.detach()), (low, high), gradient_level=high)


def learned_grid(
    x: Tensor, learned: Learned, qparams: QuantParams, levels: tuple[float, float], *, gradient_level: float
) -> Tensor:
    """Round to the levels of a grid whose scale, and zero point if there is one, are learned.

    `qparams` holds what is computed with: magnitudes of the learned values in their stored dtype. The gradients of the
    learned values are divided by sqrt(values per scale * gradient_level), so that they change as fast as weights.
    """
    factor = 1 / math.sqrt(x.numel() // qparams.scale.numel() * gradient_level)
    zero = None if qparams.zero is None else learned["zero"]
    rounded: Tensor = _LearnedGrid.apply(x, learned["scale"], zero, qparams.scale, qparams.zero, levels, factor)
    return rounded


class _LearnedGrid(torch.autograd.Function):
    """One function, since dozens of differentiable operations make each layer wait for the launches of their kernels.

    With z = x / scale + zero, y = (round(clamp(z)) - zero) * scale. Inside the range dy/dx = 1, dy/dscale = round(z) -
    z and dy/dzero = 0; outside these are 0, bound - zero and -scale.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, learned_scale: Tensor, learned_zero: Tensor | None, scale: Tensor, zero: Tensor | None,
        levels: tuple[float, float], factor: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, learned_scale, scale, zero)
        ctx.levels, ctx.factor = levels, factor
        rounded = _steps(x, scale, zero).clamp(*levels).round()
        return (rounded if zero is None else rounded - zero) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, learned_scale, scale, zero = ctx.saved_tensors
        steps = _steps(x, scale, zero)
        bounded = steps.clamp(*ctx.levels)
        inside = steps == bounded
        grad_x = grad * inside
        origin = torch.where(inside, steps, 0.0 if zero is None else zero)
        grad_scale = (grad * (bounded.round() - origin)).sum_to_size(scale.shape) * ctx.factor * learned_scale.sign()
        grad_zero = None if zero is None else (grad_x - grad).sum_to_size(zero.shape) * scale * ctx.factor
        return grad_x, grad_scale, grad_zero, None, None, None, None


def _steps(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    return x / scale if zero is None else x / scale + zero
