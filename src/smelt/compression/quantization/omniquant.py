"""OmniQuant's learned clipping of weights (Shao et al., 2024, arXiv 2308.13137)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smelt.compression.base import METHODS, within
from smelt.compression.quantization.learned import LearnedQuantization, Quantizer
from smelt.numerics.format import QuantParams
from smelt.numerics.gradient import straight_through
from smelt.numerics.integer import Integer, group_min_max

INITIAL_GATE = 4.0  # sigmoid(4) = 0.982 of the range


@METHODS.register("omniquant", paper="Shao et al., 2024 (OmniQuant, arXiv 2308.13137)", needs=("calibration data",))
@dataclass(frozen=True)
class OmniQuant(LearnedQuantization):
    """Use for 2 and 3-bit weights where training them is too slow: only clip ranges are learned.

    This is the paper's learnable weight clipping, all that it uses for weights alone; its learnable equivalent
    transformation is not here. Its batches have one sample: `batch_size: 1` in the recipe's data.
    """

    epochs: int = 20  # over the calibration data, per block; 0: clip every range to 0.982

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "epochs", self.epochs, 0, 10_000)

    def quantizer(self, weight: Tensor, generator: torch.Generator) -> Quantizer:
        return Clipped(weight, self.integer)

    def updates(self, batches: int) -> int:
        return self.epochs * batches


class Clipped(Quantizer):
    """Quantizer with learned clipping per group: max' = sigmoid(g1) max and min' = sigmoid(g2) min."""

    low: Tensor
    high: Tensor

    def __init__(self, weight: Tensor, number_format: Integer) -> None:
        super().__init__(weight, number_format)
        low, high = group_min_max(self.grouped, number_format)  # [rows, groups, 1] each
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.low_gate = nn.Parameter(torch.full_like(low, INITIAL_GATE))
        self.high_gate = nn.Parameter(torch.full_like(high, INITIAL_GATE))

    def qparams(self) -> QuantParams:
        low, high = self.low * self.low_gate.sigmoid(), self.high * self.high_gate.sigmoid()
        number_format = self.format
        if number_format.symmetric:
            span = number_format.qmax / 2 if number_format.full_range else number_format.qmax // 2
            largest = torch.maximum(high, -low)
            return QuantParams(number_format.round_scale(torch.where(largest == 0, 1.0, largest / span)))
        scale = number_format.round_scale(torch.where(high == low, 1.0, (high - low) / number_format.num_steps))
        zero = -low / scale
        return QuantParams(scale, straight_through(zero, zero.round()).clamp(0, number_format.qmax))
