"""QSGD: every element on a grid of a few levels, rounded up or down at random so that the mean is right."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import Coder, Message, Step
from smelt.train.gradients.layout import Layout


@dataclass(frozen=True)
class QSGD(Coder):
    """Of each bucket: its 2-norm, and l = floor(s |v| / norm), one more with the probability of the fraction.

    Unbiased, so it can do without a memory. With one, what it loses in a step must be less than what it is given: the
    bound min(b / s^2, sqrt(b) / s) on the error (from memory) must lie below 1."""

    name: ClassVar[str] = "qsgd"
    paper: ClassVar[str] = "Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization, NeurIPS 2017"

    levels: int = 127  # s: 1 takes 2 bits an element, up to 7 take 4, up to 127 take 8
    bucket: int = 128  # b: elements that share a norm
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise ConfigError(f"qsgd: levels is {self.levels}; it must lie between 1 and 127.")
        if self.bucket < 1:
            raise ConfigError(f"qsgd: bucket is {self.bucket}; it must be at least 1 element.")
        bound = min(self.bucket / self.levels**2, sqrt(self.bucket) / self.levels)
        if self.error_feedback and bound >= 1:
            raise ConfigError(
                f"qsgd: with {self.levels} levels and buckets of {self.bucket} the memory would grow without end; take "
                "more levels, smaller buckets, or error_feedback=False."
            )

    @property
    def feeds_back(self) -> bool:
        return self.error_feedback

    @property
    def width(self) -> int:
        """Bits of an element."""
        return 2 if self.levels == 1 else 4 if self.levels <= 7 else 8

    def target(self, elements: int) -> float:
        return elements

    def encode(self, step: Step) -> Message:
        memory = step.add()
        rows = functional.pad(memory, (0, -len(memory) % self.bucket)).view(-1, self.bucket)  # [buckets, bucket]
        norms = torch.linalg.vector_norm(rows, dim=1)
        shares = self.levels * rows / norms.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        noise = torch.rand(rows.shape, generator=step.generator(self.seed, own=True), device=rows.device)
        levels = ((shares.abs() + noise).floor().clamp_max(self.levels) * shares.sign()).flatten()[: len(memory)]
        codes = (levels + self.levels).to(torch.uint8)  # from 0 to 2 s
        return Message(torch.cat([norms.view(torch.uint8), self._pack(codes)]), memory.new_empty(0, dtype=torch.uint8))

    def variable_size(self, fixed: Tensor, layout: Layout) -> int:
        return 0

    def decode(self, fixed: Tensor, variable: Tensor, layout: Layout) -> Tensor:
        split = 4 * -(-layout.size // self.bucket)
        norms = fixed[:split].clone().view(torch.float32).repeat_interleave(self.bucket)[: layout.size]
        levels = self._unpack(fixed[split:])[: layout.size].float() - self.levels
        return norms * (levels / self.levels)

    def _pack(self, codes: Tensor) -> Tensor:
        """[count] uint8 -> [bytes] uint8, the first code lowest."""
        rows = functional.pad(codes, (0, -len(codes) % (8 // self.width))).view(-1, 8 // self.width)
        return (rows << self._shifts(codes)).sum(dim=1, dtype=torch.uint8)

    def _unpack(self, data: Tensor) -> Tensor:
        return (data[:, None] >> self._shifts(data) & ((1 << self.width) - 1)).flatten()

    def _shifts(self, like: Tensor) -> Tensor:
        return torch.arange(0, 8, self.width, dtype=torch.uint8, device=like.device)
