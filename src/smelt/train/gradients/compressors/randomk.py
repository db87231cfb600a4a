"""Random-k: elements drawn by a seed that all workers share, so that no index travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.train.gradients.compressor import Chosen, Sparsifier, Step, count


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """floor(d G) elements, each equally likely in every step; a point of reference, no substitute for the others."""

    name: ClassVar[str] = "randomk"
    paper: ClassVar[str] = "Stich et al., Sparsified SGD with Memory, NeurIPS 2018"

    seed: int = 0

    @property
    def route(self) -> str:
        return "known"

    def choose(self, step: Step) -> Chosen:
        elements = len(step.add())
        return Chosen(drawn(elements, count(self.density, elements), step.generator(self.seed, own=False)))


def drawn(elements: int, number: int, generator: torch.Generator) -> Tensor:
    """A subset of so many elements, each subset equally likely, ascending; few are drawn without shuffling all."""
    pool = torch.arange(0)
    if number < elements / 10:
        size = int(1.1 * number) + 10  # some come twice
        pool = torch.randint(elements, (size,), generator=generator, device=generator.device).unique()
    if len(pool) < number:
        pool = torch.arange(elements, device=generator.device)
    order = torch.randperm(len(pool), generator=generator, device=generator.device)
    return pool[order[:number]].sort().values
