"""QSGD: every element quantized to a few levels with unbiased stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from smelt.config import renamed
from smelt.errors import ConfigError
from smelt.train.gradients.compressor import COMPRESSORS, CompressionStep, EncodedGradient, GradientEncoder
from smelt.train.gradients.layout import BucketLayout


@COMPRESSORS.register(
    "qsgd", paper="Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization, NeurIPS 2017"
)
@dataclass(frozen=True)
class QSGD(GradientEncoder):
    """A quarter of the bytes (8 bits) at the loss of plain training; per bucket its 2-norm and stochastic levels.

    l = floor(s |v| / norm), one more with the probability of the fraction. Unbiased, so it works without error
    feedback. With it, what is lost per step must be less than what comes in: the bound min(b / s^2, sqrt(b) / s) on
    the error (from memory) must lie below 1."""

    levels: int = 127  # s: 1 takes 2 bits per element, up to 7 take 4, up to 127 take 8
    bucket_size: int = renamed("bucket", default=128)  # b: elements that share a norm
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise ConfigError(f"qsgd: levels is {self.levels}; it must lie between 1 and 127.")
        if self.bucket_size < 1:
            raise ConfigError(f"qsgd: bucket_size is {self.bucket_size}; it must be at least 1.")
        bound = min(self.bucket_size / self.levels**2, sqrt(self.bucket_size) / self.levels)
        if self.error_feedback and bound >= 1:
            raise ConfigError(
                f"qsgd: with {self.levels} levels and bucket_size {self.bucket_size} the residual would grow without "
                "bound; use more levels, a smaller bucket_size, or error_feedback=False."
            )

    @property
    def uses_error_feedback(self) -> bool:
        return self.error_feedback

    @property
    def bits(self) -> int:
        """Bits per element."""
        return 2 if self.levels == 1 else 4 if self.levels <= 7 else 8

    def target_count(self, numel: int) -> float:
        return numel

    def encode(self, step: CompressionStep) -> EncodedGradient:
        accumulated = step.accumulate()
        numel = len(accumulated)
        rows = functional.pad(accumulated, (0, -numel % self.bucket_size)).view(-1, self.bucket_size)
        norms = torch.linalg.vector_norm(rows, dim=1)  # [buckets]
        scaled = self.levels * rows / norms.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        noise = torch.rand(rows.shape, generator=step.generator(self.seed, per_rank=True), device=rows.device)
        levels = ((scaled.abs() + noise).floor().clamp_max(self.levels) * scaled.sign()).flatten()[:numel]
        codes = (levels + self.levels).to(torch.uint8)  # from 0 to 2 s
        fixed = torch.cat([norms.view(torch.uint8), self._pack(codes)])
        return EncodedGradient(fixed, accumulated.new_empty(0, dtype=torch.uint8))

    def variable_size(self, fixed: Tensor, layout: BucketLayout) -> int:
        return 0

    def decode(self, fixed: Tensor, variable: Tensor, layout: BucketLayout) -> Tensor:
        split = 4 * -(-layout.numel // self.bucket_size)
        norms = fixed[:split].clone().view(torch.float32).repeat_interleave(self.bucket_size)[: layout.numel]
        levels = self._unpack(fixed[split:])[: layout.numel].float() - self.levels
        return norms * (levels / self.levels)

    def _pack(self, codes: Tensor) -> Tensor:
        """[count] uint8 -> [bytes] uint8, the first code lowest"""
        rows = functional.pad(codes, (0, -len(codes) % (8 // self.bits))).view(-1, 8 // self.bits)
        return (rows << self._shifts(codes)).sum(dim=1, dtype=torch.uint8)

    def _unpack(self, data: Tensor) -> Tensor:
        return (data[:, None] >> self._shifts(data) & ((1 << self.bits) - 1)).flatten()

    def _shifts(self, like: Tensor) -> Tensor:
        return torch.arange(0, 8, self.bits, dtype=torch.uint8, device=like.device)
