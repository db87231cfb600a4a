"""Random-k: elements drawn with a seed that all ranks share, so that no index is sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.train.gradients.compressor import COMPRESSORS, CompressionStep, SelectedIndices, Sparsifier, topk_count


@COMPRESSORS.register("randomk", paper="Stich et al., Sparsified SGD with Memory, NeurIPS 2018")
@dataclass(frozen=True)
class RandomK(Sparsifier):
    """A reference point, no substitute for the others: floor(d G) elements, each equally likely in every step."""

    seed: int = 0

    @property
    def exchange_mode(self) -> str:
        return "known"

    def select(self, step: CompressionStep) -> SelectedIndices:
        numel = len(step.accumulate())
        generator = step.generator(self.seed, per_rank=False)
        return SelectedIndices(random_subset(numel, topk_count(self.density, numel), generator))


def random_subset(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """Return k of `numel` indices, each subset equally likely, ascending; a small k is drawn without a shuffle."""
    pool = torch.arange(0)
    if k < numel / 10:
        size = int(1.1 * k) + 10  # some are drawn twice
        pool = torch.randint(numel, (size,), generator=generator, device=generator.device).unique()
    if len(pool) < k:
        pool = torch.arange(numel, device=generator.device)
    order = torch.randperm(len(pool), generator=generator, device=generator.device)
    return pool[order[:k]].sort().values
