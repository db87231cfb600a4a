"""DoReFa: weights through a tanh into [-1, 1], activations clipped to [0, 1] (Zhou et al., 2016)."""

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
    WeightQuantizer,
    check_bits,
)
from smelt.numerics.format import PER_TENSOR, Format, QuantParams
from smelt.numerics.gradient import straight_through
from smelt.numerics.integer import Integer

_PAPER = "Zhou et al., 2016 (DoReFa-Net, arXiv 1606.06160)"


@WEIGHT_QUANTIZERS.register("dorefa", paper=_PAPER)
@dataclass(frozen=True)
class Dorefa(WeightQuantizer):
    """Map weights into [-1, 1] by tanh(w) / max|tanh(w)|, on levels without zero.

    The weights lose their scale: a batch norm has to follow each layer.
    """

    bits: int = 2

    def __post_init__(self) -> None:
        check_bits("dorefa", self.bits)

    @property
    def format(self) -> Format:
        return Integer(PER_TENSOR, "float32", self.bits, symmetric=False, zero_dtype="float32")

    def transform(self, weight: Tensor) -> Tensor:
        squashed = torch.tanh(weight)
        return squashed / squashed.detach().abs().amax().clamp(min=1e-12)

    def qparams(self, groups: Tensor, learned: Learned) -> QuantParams:
        levels = 2**self.bits - 1
        return QuantParams(groups.new_full((1, 1, 1), 2 / levels), groups.new_full((1, 1, 1), levels / 2))


@ACTIVATION_QUANTIZERS.register("dorefa", paper=_PAPER)
@dataclass(frozen=True)
class DorefaActivations(ActivationQuantizer):
    """Clip activations to [0, 1]; nothing is learned."""

    signed: ClassVar[bool] = False  # type: ignore[misc]
    bits: int = 2

    def __post_init__(self) -> None:
        check_bits("dorefa", self.bits)

    def init(self, x: Tensor) -> Learned:
        return {}

    def scale(self, bits: int, learned: Learned) -> Tensor:
        return torch.tensor(1 / (2**bits - 1))

    def fake_quantize(self, x: Tensor, bits: int, learned: Learned) -> Tensor:
        scale = self.scale(bits, learned).to(x.device)
        return straight_through(x.clamp(0, 1), (x / scale).round().clamp(0, 2**bits - 1) * scale)
