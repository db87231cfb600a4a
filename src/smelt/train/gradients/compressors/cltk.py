"""CLT-k (ScaleCom): the largest elements of one worker, the leader of the step, serve all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from smelt.train.gradients.compressor import Chosen, Sparsifier, Step, count


@dataclass(frozen=True)
class CLTk(Sparsifier):
    """Leader t mod n broadcasts its top-k; as many are sent as were asked for. `Settings(beta=...)` is its filter.

    `chunked` takes the largest of each run of 1/d elements instead of sorting; that form is known from memory only.
    """

    name: ClassVar[str] = "cltk"
    paper: ClassVar[str] = (
        "Chen et al., ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed "
        "Training, NeurIPS 2020 (arXiv 2104.11125)"
    )

    chunked: bool = False

    @property
    def route(self) -> str:
        return "leader"

    def choose(self, step: Step) -> Chosen:
        memory = step.add()
        if step.workers.rank != step.number % step.workers.size:
            return Chosen(memory.new_empty(0, dtype=torch.int64))
        number = count(self.density, len(memory))
        if self.chunked and len(memory):
            return Chosen(_largest_of_chunks(memory, -(-len(memory) // number)))
        return Chosen(memory.abs().topk(number, sorted=False).indices.sort().values)


def _largest_of_chunks(memory: Tensor, length: int) -> Tensor:
    chunks = functional.pad(memory.abs(), (0, -len(memory) % length), value=-1.0).view(-1, length)
    return chunks.argmax(dim=1) + torch.arange(len(chunks), device=memory.device) * length
