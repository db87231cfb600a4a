"""A reduced vector on its way out, written into gradients tensor by tensor.

A sparse one is never whole on a CPU, where a pass over memory costs more than the few that were sent: each gradient is
emptied where it lies, and these are put in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Whole:
    """All elements side by side."""

    flat: Tensor  # [elements]

    def dense(self) -> Tensor:
        return self.flat

    def scaled(self, scale: Tensor) -> Whole:
        return Whole(self.flat * scale)

    def into(self, start: int, gradient: Tensor) -> None:
        """A gradient becomes the part that begins there."""
        gradient.copy_(self.flat[start : start + gradient.numel()].view_as(gradient))


@dataclass(frozen=True)
class Few:
    """Zero but for these."""

    indices: Tensor  # [count] int64, ascending
    values: Tensor  # [count]
    size: int  # elements

    @classmethod
    def of(cls, indices: Tensor, values: Tensor, size: int) -> Few:
        """Indices in any order, each once."""
        if not bool((indices[1:] > indices[:-1]).all()):
            indices, order = indices.sort()
            values = values[order]
        return cls(indices, values, size)

    def dense(self) -> Tensor:
        return self._part(0, self.size)

    def scaled(self, scale: Tensor) -> Few:
        return Few(self.indices, self.values * scale, self.size)

    def into(self, start: int, gradient: Tensor) -> None:
        """A gradient becomes the part that begins there."""
        if not gradient.is_contiguous():
            gradient.copy_(self._part(start, gradient.numel()).view_as(gradient))
            return
        gradient.zero_()
        self._put(start, gradient.view(-1))

    def _part(self, start: int, size: int) -> Tensor:
        found = torch.zeros(size, dtype=self.values.dtype, device=self.values.device)
        self._put(start, found)
        return found

    def _put(self, start: int, flat: Tensor) -> None:
        ends = torch.tensor([start, start + len(flat)], device=self.indices.device)
        first, last = torch.searchsorted(self.indices, ends).tolist()
        flat[self.indices[first:last] - start] = self.values[first:last].to(flat.dtype)


Mean = Whole | Few
