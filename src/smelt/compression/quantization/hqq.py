"""HQQ: zero points that minimize the l_p error of the weights, without data (Badri and Shaji, 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.compression.base import METHODS, within
from smelt.compression.quantization.base import BlockWork, Quantization
from smelt.config import renamed
from smelt.errors import RecipeError
from smelt.numerics.format import QuantizedTensor, QuantParams
from smelt.numerics.integer import Integer

MAX_INVERSE_SCALE = 2e4
MAX_ZERO_POINT = 6e4  # in float16


@METHODS.register("hqq", paper="Badri and Shaji, 2023 (Half-Quadratic Quantization)")
@dataclass(frozen=True)
class Hqq(Quantization):
    """Use at 4 bits and below without calibration data, where it is better than rtn."""

    group_size: int = 64
    lp_norm: float = renamed("power", default=0.7)  # p of the l_p norm
    beta: float = 10.0  # penalty of the proximal step; larger values shrink errors less
    iterations: int = 20  # at most; stops when the mean error no longer decreases

    any_format: ClassVar[bool] = False
    convolutions: ClassVar[bool] = True
    needs_chain: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "lp_norm", self.lp_norm, 0.05, 1.0)
        within(self.name, "beta", self.beta, 1e-3, 1e6)
        within(self.name, "iterations", self.iterations, 0, 1000)
        if self.symmetric or self.format is not None:
            raise RecipeError("hqq moves zero points: it needs asymmetric integers, so leave symmetric and format out.")

    @property
    def weight_format(self) -> Integer:
        return Integer(self.group_size, "float16", self.bits, False, zero_dtype="float16")

    def quantize(self, work: BlockWork) -> None:
        for group in work.groups:
            number_format = work.weight_format(group)
            assert isinstance(number_format, Integer)
            work.replace_layers(group, [self.quantize_matrix(layer.weight, number_format) for layer in group.layers])

    @torch.no_grad()
    def quantize_matrix(self, weight: Tensor, number_format: Integer | None = None) -> QuantizedTensor:
        """Quantize a matrix [out, in] by half-quadratic splitting.

        Each iteration shrinks the error to its sparse part, then recomputes the zero point as a mean.
        """
        number_format = number_format or self.weight_format
        grouped = number_format.split_groups(weight)
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        inverse = torch.where(high == low, 1.0, (number_format.qmax / (high - low)).clamp(max=MAX_INVERSE_SCALE))
        inverse = torch.minimum(inverse, MAX_ZERO_POINT / low.abs())
        scale = number_format.round_scale(1 / inverse)
        zero = -low / scale
        best, best_error = zero, torch.inf
        for _ in range(self.iterations):
            codes = (grouped / scale + zero).round().clamp(0, number_format.qmax)
            error = grouped - (codes - zero) * scale
            mean_error = float(error.abs().mean())
            if mean_error >= best_error:
                break
            best, best_error = zero, mean_error
            sparse_error = error.sign() * (error.abs() - error.abs().pow(self.lp_norm - 1) / self.beta).relu()
            zero = (codes - (grouped - sparse_error) / scale).mean(-1, keepdim=True)
        qparams = QuantParams(scale, number_format.round_zero(best))
        codes = number_format.quantize_groups(grouped, qparams).flatten(-2)[..., : weight.shape[1]]
        return QuantizedTensor(number_format, codes, qparams)
