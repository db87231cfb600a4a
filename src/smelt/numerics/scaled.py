"""Formats of elements times a shared scale: FP8, OCP microscaling (MX), NVFP4, AMXFP4, NormalFloat, ternary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.numerics.elements import E2M1, TERNARY, ElementType
from smelt.numerics.format import PER_TENSOR, Format, QuantParams, drop_infinities, global_amax, group_amax
from smelt.numerics.scales import (
    FLOAT_SCALES,
    POWER_OF_TWO_SCALES,
    ScaleDtype,
    exact_divide,
    power_of_two_scale,
    round_scale,
)


@dataclass(frozen=True)
class Scaled(Format):
    """Elements with one scale per group that maps its largest magnitude to the largest element."""

    elements: ElementType = E2M1

    scale_dtypes: ClassVar[tuple[ScaleDtype, ...]] = FLOAT_SCALES + POWER_OF_TWO_SCALES

    @property
    def bits(self) -> int:
        return self.elements.bits

    def compute_qparams(
        self, x: Tensor, *, clip_ratio: Tensor | float = 1.0, tensor_amax: Tensor | None = None
    ) -> QuantParams:
        return QuantParams(self.scale_for(group_amax(x, self) * clip_ratio))

    def scale_for(self, amax: Tensor) -> Tensor:
        if self.scale_dtype in POWER_OF_TWO_SCALES:
            scale = power_of_two_scale(amax, self.scale_dtype, math.floor(math.log2(self.elements.max_value)))
        else:
            scale = round_scale(exact_divide(amax, self.elements.max_value), self.scale_dtype)
        return torch.where(amax == 0, 1.0, scale)

    def scale_of(self, x: Tensor, qparams: QuantParams) -> Tensor:
        """Return the scale of each value. Values may be quantized or not: at most their signs matter."""
        return qparams.scale

    def quantize_groups(self, x: Tensor, qparams: QuantParams) -> Tensor:
        return self.elements.encode(self._scaled(x, qparams))

    def quantize_groups_stochastic(
        self, x: Tensor, qparams: QuantParams, generator: torch.Generator | None = None
    ) -> Tensor:
        return self.elements.encode_stochastic(self._scaled(x, qparams), generator)

    def _scaled(self, x: Tensor, qparams: QuantParams) -> Tensor:
        return (x / self.scale_of(x, qparams)).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)

    def dequantize_groups(self, codes: Tensor, qparams: QuantParams) -> Tensor:
        values = self.elements.decode(codes)
        return values * self.scale_of(values, qparams)


@dataclass(frozen=True)
class Unsigned(Scaled):
    """Integers from 0 on, for activations after a ReLU: values below zero saturate and do not count for the scale."""

    scale_dtypes: ClassVar[tuple[ScaleDtype, ...]] = FLOAT_SCALES

    def compute_qparams(
        self, x: Tensor, *, clip_ratio: Tensor | float = 1.0, tensor_amax: Tensor | None = None
    ) -> QuantParams:
        return super().compute_qparams(x.clamp(min=0), clip_ratio=clip_ratio)


@dataclass(frozen=True)
class SignedScales(Scaled):
    """AMXFP4: separate scales for the positive and negative elements of a group, selected by the sign."""

    @property
    def qparams_bits(self) -> int:
        return 2 * super().qparams_bits

    def compute_qparams(
        self, x: Tensor, *, clip_ratio: Tensor | float = 1.0, tensor_amax: Tensor | None = None
    ) -> QuantParams:
        positive = self.scale_for(group_amax(x.clamp(min=0), self) * clip_ratio)
        return QuantParams(positive, negative=self.scale_for(group_amax(x.clamp(max=0), self) * clip_ratio))

    def scale_of(self, x: Tensor, qparams: QuantParams) -> Tensor:
        assert qparams.negative is not None
        return torch.where(x > 0, qparams.scale, qparams.negative)


@dataclass(frozen=True)
class TensorScaled(Scaled):
    """NVFP4: group scales in E4M3, with a per-tensor factor that makes them use its full range."""

    group_size: int = 16
    scale_dtype: ScaleDtype = "e4m3"

    scale_dtypes: ClassVar[tuple[ScaleDtype, ...]] = ("e4m3",)

    @property
    def tensor_bits(self) -> int:
        return 32

    def tensor_amax(self, x: Tensor) -> Tensor:
        """Return the largest magnitude. NaN is ignored: it must not spread to other groups through this factor."""
        return global_amax(drop_infinities(x.float()).nan_to_num(nan=0.0).abs())

    def compute_qparams(
        self, x: Tensor, *, clip_ratio: Tensor | float = 1.0, tensor_amax: Tensor | None = None
    ) -> QuantParams:
        amax = self.tensor_amax(x) if tensor_amax is None else tensor_amax
        max_magnitude = 448.0 * self.elements.max_value  # largest E4M3 scale times largest element
        tensor = round_scale(torch.where(amax == 0, 1.0, max_magnitude / amax), "float32").reshape([1] * x.dim())
        stored = round_scale(
            exact_divide(group_amax(x, self) * clip_ratio * tensor, self.elements.max_value), self.scale_dtype
        )
        return QuantParams(stored, tensor=tensor)

    def scale_of(self, x: Tensor, qparams: QuantParams) -> Tensor:
        assert qparams.tensor is not None
        return qparams.scale / qparams.tensor


@dataclass(frozen=True)
class Ternary(Scaled):
    """-1, 0 or 1 times the mean magnitude of a group (Ma et al., 2024).

    Zeros are left out of the mean, so that it does not depend on padding and weights that are already ternary do not
    change.
    """

    elements: ElementType = TERNARY

    scale_dtypes: ClassVar[tuple[ScaleDtype, ...]] = FLOAT_SCALES

    def compute_qparams(
        self, x: Tensor, *, clip_ratio: Tensor | float = 1.0, tensor_amax: Tensor | None = None
    ) -> QuantParams:
        magnitudes = drop_infinities(x).abs()
        total, count = magnitudes.sum(-1, keepdim=True), (magnitudes > 0).sum(-1, keepdim=True)
        if self.group_size == PER_TENSOR:
            total, count = (part.sum().reshape([1] * x.dim()) for part in (total, count))
        mean = total / count.clamp(min=1)
        return QuantParams(torch.where(mean == 0, 1.0, round_scale(mean * clip_ratio, self.scale_dtype)))
