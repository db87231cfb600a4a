"""EF-signSGD: one bit per element and one scale per tensor, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.train.gradients.compressor import COMPRESSORS, CompressionStep, EncodedGradient, GradientEncoder
from smelt.train.gradients.encoding import pack_bits, unpack_bits
from smelt.train.gradients.layout import BucketLayout


@COMPRESSORS.register(
    "efsign",
    paper="Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019",
)
@dataclass(frozen=True)
class EFSign(GradientEncoder):
    """Send 1/32 of the bytes at negligible computing cost: mean|p| sign(p) of every tensor, p = residual + gradient."""

    def target_count(self, numel: int) -> float:
        return numel

    def encode(self, step: CompressionStep) -> EncodedGradient:
        accumulated = step.accumulate()
        views = step.layout.views(accumulated)
        scales = torch.stack([values.abs().sum() / max(part.numel, 1) for part, values in views])
        fixed = torch.cat([scales.view(torch.uint8), pack_bits(accumulated < 0)])
        return EncodedGradient(fixed, accumulated.new_empty(0, dtype=torch.uint8))

    def variable_size(self, fixed: Tensor, layout: BucketLayout) -> int:
        return 0

    def decode(self, fixed: Tensor, variable: Tensor, layout: BucketLayout) -> Tensor:
        split = 4 * len(layout.slices)
        sizes = torch.tensor([part.numel for part in layout.slices], device=fixed.device)
        scales = fixed[:split].clone().view(torch.float32).repeat_interleave(sizes)
        return torch.where(unpack_bits(fixed[split:], layout.numel), -scales, scales)
