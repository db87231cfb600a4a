"""Top-k: the largest elements of the whole vector, or of every tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.train.gradients.compressor import Chosen, Independent, Step, count


@dataclass(frozen=True)
class TopK(Independent):
    """The floor(d G) largest |memory|, exactly; of all workers together up to n times as many are sent."""

    name: ClassVar[str] = "topk"
    paper: ClassVar[str] = (
        "Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; Stich et al., Sparsified "
        "SGD with Memory, NeurIPS 2018"
    )

    per_tensor: bool = False  # the same density in every tensor, at least one element each

    def choose(self, step: Step) -> Chosen:
        memory = step.add()
        if not self.per_tensor:
            return Chosen(largest(memory, count(self.density, len(memory))))
        views = ((piece, view) for piece, view in step.layout.views(memory) if piece.size)
        found = [largest(view, count(self.density, piece.size)) + piece.start for piece, view in views]
        return Chosen(torch.cat(found) if found else memory.new_empty(0, dtype=torch.int64))


def largest(values: Tensor, number: int) -> Tensor:
    """Where the `number` largest magnitudes are, ascending."""
    return values.abs().topk(number, sorted=False).indices.sort().values
