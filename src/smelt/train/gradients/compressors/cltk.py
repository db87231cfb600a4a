"""CLT-k (ScaleCom): all ranks send the elements that one rank, the leader of the step, finds largest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from smelt.train.gradients.compressor import COMPRESSORS, CompressionStep, SelectedIndices, Sparsifier, topk_count


@COMPRESSORS.register(
    "cltk",
    paper=(
        "Chen et al., ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed "
        "Training, NeurIPS 2020 (arXiv 2104.11125)"
    ),
)
@dataclass(frozen=True)
class CLTk(Sparsifier):
    """Send exactly the target count with the fewest index bytes, where gradients are similar on all ranks.

    Leader t mod n broadcasts its top-k. `CompressionSettings(residual_momentum=...)` is the paper's filter. `chunked`
    takes the largest of each run of 1/d elements instead of sorting; that form is from memory only.
    """

    chunked: bool = False

    @property
    def exchange_mode(self) -> str:
        return "leader"

    def select(self, step: CompressionStep) -> SelectedIndices:
        accumulated = step.accumulate()
        if step.comm.rank != step.iteration % step.comm.world_size:
            return SelectedIndices(accumulated.new_empty(0, dtype=torch.int64))
        k = topk_count(self.density, len(accumulated))
        if self.chunked and len(accumulated):
            return SelectedIndices(_argmax_per_chunk(accumulated, -(-len(accumulated) // k)))
        return SelectedIndices(accumulated.abs().topk(k, sorted=False).indices.sort().values)


def _argmax_per_chunk(values: Tensor, length: int) -> Tensor:
    chunks = functional.pad(values.abs(), (0, -len(values) % length), value=-1.0).view(-1, length)
    return chunks.argmax(dim=1) + torch.arange(len(chunks), device=values.device) * length
