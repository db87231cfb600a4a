"""1-bit SGD: one bit per element and, per tensor, the mean of its negative elements and of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.train.gradients.compressor import COMPRESSORS, CompressionStep, EncodedGradient, GradientEncoder
from smelt.train.gradients.encoding import pack_bits, unpack_bits
from smelt.train.gradients.layout import BucketLayout


@COMPRESSORS.register(
    "onebit",
    paper=(
        "Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of "
        "Speech DNNs, Interspeech 2014"
    ),
)
@dataclass(frozen=True)
class OneBit(GradientEncoder):
    """Like efsign with two means per tensor, so that the sum of a tensor is exact."""

    def target_count(self, numel: int) -> float:
        return numel

    def encode(self, step: CompressionStep) -> EncodedGradient:
        accumulated = step.accumulate()
        negative = accumulated < 0
        views = zip(step.layout.views(accumulated), step.layout.views(negative), strict=True)
        means = torch.stack([_signed_means(values, below) for (_, values), (_, below) in views])  # [slices, 2]
        fixed = torch.cat([means.flatten().view(torch.uint8), pack_bits(negative)])
        return EncodedGradient(fixed, accumulated.new_empty(0, dtype=torch.uint8))

    def variable_size(self, fixed: Tensor, layout: BucketLayout) -> int:
        return 0

    def decode(self, fixed: Tensor, variable: Tensor, layout: BucketLayout) -> Tensor:
        split = 8 * len(layout.slices)
        sizes = torch.tensor([part.numel for part in layout.slices], device=fixed.device)
        means = fixed[:split].clone().view(torch.float32).view(-1, 2).repeat_interleave(sizes, dim=0)
        return torch.where(unpack_bits(fixed[split:], layout.numel), means[:, 0], means[:, 1])


def _signed_means(values: Tensor, negative: Tensor) -> Tensor:
    """[2]: the mean of the negative elements, and of the others"""
    below, above = values.clamp_max(0).sum(), values.clamp_min(0).sum()
    count = negative.sum()
    return torch.stack([below / count.clamp_min(1), above / (len(values) - count).clamp_min(1)])
