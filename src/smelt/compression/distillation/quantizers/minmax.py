"""Round to nearest in any format, with scales from the largest magnitudes: the baseline without anything learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.compression.distillation.quantizers.base import (
    ACTIVATION_QUANTIZERS,
    WEIGHT_QUANTIZERS,
    ActivationQuantizer,
    Learned,
    NamedFormatQuantizer,
    check_bits,
)
from smelt.numerics.format import QuantParams
from smelt.numerics.gradient import straight_through


@WEIGHT_QUANTIZERS.register("minmax", paper="Jacob et al., 2018 (arXiv 1712.05877)")
@dataclass(frozen=True)
class MinMax(NamedFormatQuantizer):
    """Round to nearest in any format of `smelt formats`; scales follow the weights."""

    weight_format: str = "int4/128@float16"

    def qparams(self, groups: Tensor, learned: Learned) -> QuantParams:
        with torch.no_grad():
            return self.format.compute_qparams(groups, tensor_amax=self.format.tensor_amax(groups))


@ACTIVATION_QUANTIZERS.register("minmax", paper="Jacob et al., 2018 (arXiv 1712.05877)")
@dataclass(frozen=True)
class MinMaxActivations(ActivationQuantizer):
    """Round to nearest up to the largest magnitude of the first batch, which stays as it is."""

    trainable: ClassVar[bool] = False
    bits: int = 8
    signed: bool = False

    def __post_init__(self) -> None:
        check_bits("minmax", self.bits)

    def init(self, x: Tensor) -> Learned:
        return {"amax": x.detach().abs().amax().float().clamp(min=1e-6)}

    def scale(self, bits: int, learned: Learned) -> Tensor:
        return learned["amax"].detach() / self.levels(bits)[1]

    def fake_quantize(self, x: Tensor, bits: int, learned: Learned) -> Tensor:
        scale = self.scale(bits, learned)
        low, high = self.levels(bits)
        return straight_through(x.clamp(low * scale, high * scale), (x / scale).round().clamp(low, high) * scale)
