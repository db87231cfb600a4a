"""Top-k: the largest elements of the bucket, or of every tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.train.gradients.compressor import (
    COMPRESSORS,
    CompressionStep,
    IndependentSparsifier,
    SelectedIndices,
    topk_count,
)


@COMPRESSORS.register(
    "topk",
    paper=(
        "Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; Stich et al., Sparsified "
        "SGD with Memory, NeurIPS 2018"
    ),
)
@dataclass(frozen=True)
class TopK(IndependentSparsifier):
    """The reference for selection quality: the floor(d G) largest |residual|; n ranks send up to n times as many."""

    per_tensor: bool = False  # the same density in every tensor, at least one element each

    def select(self, step: CompressionStep) -> SelectedIndices:
        accumulated = step.accumulate()
        if not self.per_tensor:
            return SelectedIndices(topk_indices(accumulated, topk_count(self.density, len(accumulated))))
        indices = [
            topk_indices(view, topk_count(self.density, part.numel)) + part.start
            for part, view in step.layout.views(accumulated)
            if part.numel
        ]
        return SelectedIndices(torch.cat(indices) if indices else accumulated.new_empty(0, dtype=torch.int64))


def topk_indices(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest magnitudes, ascending."""
    return values.abs().topk(k, sorted=False).indices.sort().values
