"""Ternary weight networks: a threshold at 0.7 of the mean magnitude (Li et al., 2016), as TernaryBERT and TSLD use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from smelt.compression.base import within
from smelt.compression.distillation.quantizers.base import WEIGHT_QUANTIZERS, Learned, WeightQuantizer
from smelt.numerics.catalog import get_format
from smelt.numerics.format import Format, QuantParams


@WEIGHT_QUANTIZERS.register("twn", paper="Li et al., 2016 (TWN, arXiv 1605.04711)")
@dataclass(frozen=True)
class Twn(WeightQuantizer):
    """Set weights below a threshold to zero, and the others to plus or minus their mean magnitude."""

    group_size: int = -1  # weights that share a scale; -1: an output channel, 0: the tensor
    threshold: float = 0.7  # of the mean magnitude

    def __post_init__(self) -> None:
        within("twn", "threshold", self.threshold, 0.0, 2.0)

    @cached_property
    def format(self) -> Format:
        return get_format("ternary").with_group_size(self.group_size)

    def qparams(self, groups: Tensor, learned: Learned) -> QuantParams:
        with torch.no_grad():
            magnitudes = groups.abs()
            kept = magnitudes > self._threshold(magnitudes)
            total, count = (magnitudes * kept).sum(-1, keepdim=True), kept.sum(-1, keepdim=True)
            if self.group_size == 0:
                total, count = total.sum().reshape(1, 1, 1), count.sum().reshape(1, 1, 1)
            return QuantParams(torch.where(count > 0, total / count.clamp(min=1), 1.0))

    def encode(self, groups: Tensor, qparams: QuantParams) -> Tensor:
        """Return the codes 0, 1 and 2 of negative weights, zeros and positive ones; a sum of bytes, for speed.

        Bools are converted: the compiler of torch 2.11 cannot view them as bytes.
        """
        threshold = self._threshold(groups.abs())
        is_positive, is_not_negative = groups > threshold, groups >= -threshold
        return is_positive.to(torch.uint8) + is_not_negative

    def _threshold(self, magnitudes: Tensor) -> Tensor:
        mean = magnitudes.mean().reshape(1, 1, 1) if self.group_size == 0 else magnitudes.mean(-1, keepdim=True)
        return self.threshold * mean
