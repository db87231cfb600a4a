"""The gradients of a vector where backward left them: who only adds them to a memory needs no copy side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.train.layout import Layout


@dataclass(frozen=True)
class Pieces:
    """One tensor for each piece of the layout, in its order and of its size."""

    layout: Layout
    tensors: Sequence[Tensor]

    def flat(self) -> Tensor:
        """[elements] float32, a copy."""
        return torch.cat([tensor.reshape(-1).float() for tensor in self.tensors])

    def add_to(self, memory: Tensor) -> Tensor:
        """[elements], in place."""
        for (_, view), tensor in zip(self.layout.views(memory), self.tensors, strict=True):
            view.view_as(tensor).add_(tensor)
        return memory


Given = Tensor | Pieces  # the gradients of one vector, [elements] or in pieces


def flat_of(given: Given) -> Tensor:
    """[elements] float32."""
    return given.flat() if isinstance(given, Pieces) else given.float()


def all_finite(given: Given) -> Tensor:
    """[] bool. A finite sum has only finite parts, and a sum is the fastest look at a vector that a CPU has."""
    if isinstance(given, Pieces):
        return torch.tensor(all(bool(all_finite(tensor)) for tensor in given.tensors))
    if given.device.type == "cpu" and given.sum().isfinite():
        return torch.tensor(True)
    return torch.linalg.vector_norm(given, torch.inf).isfinite()
