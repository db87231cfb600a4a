"""The gradients of a vector where backward left them: who only adds them to a memory needs no copy side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from smelt.train.gradients.layout import Layout

_NEAR = 1 << 17  # elements that a processor's own cache holds beside as many of the memory


class Pieces:
    """One tensor for each piece of the layout, in its order and of its size. Whether they are finite is found by a look
    at all of them, or on the way when they are added; what is not finite never leaves."""

    def __init__(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        self.layout, self.tensors = layout, tensors
        self._finite: Tensor | None = None  # [] bool, once it is known

    def all_finite(self) -> Tensor:
        """[] bool"""
        if self._finite is None:
            self._finite = torch.tensor(all(bool(all_finite(tensor)) for tensor in self.tensors))
        return self._finite

    def flat(self) -> Tensor:
        """[elements] float32, a copy; zeros unless all is finite."""
        if not self.all_finite():
            return torch.zeros(self.layout.size)
        return torch.cat([tensor.reshape(-1).float() for tensor in self.tensors])

    def add_to(self, memory: Tensor) -> Tensor:
        """[elements], in place, up to what is not finite."""
        if self._finite is None:
            self._finite = torch.tensor(all(map(_add_finite, self._own(memory), self.tensors)))
        elif self._finite:
            for own, tensor in zip(self._own(memory), self.tensors, strict=True):
                own.add_(tensor)
        return memory

    def _own(self, memory: Tensor) -> Iterator[Tensor]:
        """The part of each tensor, in its shape."""
        return (view.view_as(tensor) for (_, view), tensor in zip(self.layout.views(memory), self.tensors, strict=True))


def _add_finite(memory: Tensor, gradient: Tensor) -> bool:
    """Add piece by piece what was just looked at and is still near the processor; whether all is finite."""
    if not gradient.is_contiguous():
        return bool(all_finite(gradient)) and memory.add_(gradient) is memory
    for own, part in zip(memory.view(-1).split(_NEAR), gradient.view(-1).split(_NEAR), strict=True):
        if not all_finite(part):
            return False
        own.add_(part)
    return True


Given = Tensor | Pieces  # the gradients of one vector, [elements] or in pieces


def flat_of(given: Given) -> Tensor:
    """[elements] float32."""
    return given.flat() if isinstance(given, Pieces) else given.float()


def all_finite(given: Given) -> Tensor:
    """[] bool. A finite sum has only finite parts, and a sum is the fastest look at a vector that a CPU has."""
    if isinstance(given, Pieces):
        return given.all_finite()
    if given.device.type == "cpu" and given.sum().isfinite():
        return torch.tensor(True)
    return torch.linalg.vector_norm(given, torch.inf).isfinite()
