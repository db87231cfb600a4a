"""1-bit SGD: one bit an element and, of every tensor, the mean of its negative elements and of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.train.gradients import bits
from smelt.train.gradients.compressor import Coder, Message, Step
from smelt.train.gradients.layout import Layout


@dataclass(frozen=True)
class OneBit(Coder):
    """Two means of each tensor, so that the sum over a tensor is kept exactly."""

    name: ClassVar[str] = "onebit"
    paper: ClassVar[str] = (
        "Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of "
        "Speech DNNs, Interspeech 2014"
    )

    def target(self, elements: int) -> float:
        return elements

    def encode(self, step: Step) -> Message:
        memory = step.add()
        negative = memory < 0
        means = [
            _means(values, below)
            for (_, values), (_, below) in zip(step.layout.views(memory), step.layout.views(negative), strict=True)
        ]
        both = torch.stack(means).flatten()  # [pieces * 2]
        return Message(torch.cat([both.view(torch.uint8), bits.pack(negative)]), memory.new_empty(0, dtype=torch.uint8))

    def variable_size(self, fixed: Tensor, layout: Layout) -> int:
        return 0

    def decode(self, fixed: Tensor, variable: Tensor, layout: Layout) -> Tensor:
        split = 8 * len(layout.pieces)
        sizes = torch.tensor([piece.size for piece in layout.pieces], device=fixed.device)
        means = fixed[:split].clone().view(torch.float32).view(-1, 2).repeat_interleave(sizes, dim=0)
        return torch.where(bits.unpack(fixed[split:], layout.size), means[:, 0], means[:, 1])


def _means(values: Tensor, negative: Tensor) -> Tensor:
    """Of the negative ones, and of the others: [2]"""
    below, above = values.clamp_max(0).sum(), values.clamp_min(0).sum()
    number = negative.sum()
    return torch.stack([below / number.clamp_min(1), above / (len(values) - number).clamp_min(1)])
