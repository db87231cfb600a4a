"""EF-signSGD: one bit an element and one scale a tensor, what they do not say is remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.train.gradients import bits
from smelt.train.gradients.compressor import Coder, Message, Step
from smelt.train.gradients.layout import Layout


@dataclass(frozen=True)
class EFSign(Coder):
    """mean|p| sign(p) of every tensor, with p the residual and the gradient."""

    name: ClassVar[str] = "efsign"
    paper: ClassVar[str] = (
        "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019"
    )

    def target(self, elements: int) -> float:
        return elements

    def encode(self, step: Step) -> Message:
        memory = step.add()
        scales = torch.stack([values.abs().sum() / max(piece.size, 1) for piece, values in step.layout.views(memory)])
        return Message(
            torch.cat([scales.view(torch.uint8), bits.pack(memory < 0)]), memory.new_empty(0, dtype=torch.uint8)
        )

    def variable_size(self, fixed: Tensor, layout: Layout) -> int:
        return 0

    def decode(self, fixed: Tensor, variable: Tensor, layout: Layout) -> Tensor:
        split = 4 * len(layout.pieces)
        sizes = torch.tensor([piece.size for piece in layout.pieces], device=fixed.device)
        scales = fixed[:split].clone().view(torch.float32).repeat_interleave(sizes)
        return torch.where(bits.unpack(fixed[split:], layout.size), -scales, scales)
