"""ExDyna: MiCRO whose ranges are made of small blocks, which move between neighbours until the counts even out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import State, Step
from smelt.train.gradients.exclusive import ExclusiveThreshold, equal_range
from smelt.train.gradients.layout import Layout

_ALIGNMENT = 32  # elements that a block's size is a multiple of
_BAND = 1.05  # a partition this far above the mean gives a block to a neighbour this far below it


@dataclass(frozen=True)
class ExDyna(ExclusiveThreshold):
    """One block a step moves between a full partition and a poor one beside it; no partition falls below a quarter
    of its first size. A vector too short for `blocks` blocks of 32 elements is cut as MiCRO cuts it."""

    name: ClassVar[str] = "exdyna"
    paper: ClassVar[str] = (
        "Yoon and Oh, Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning, "
        "CCGrid 2024 (arXiv 2402.13781)"
    )

    blocks: int = 1024  # that the vector is cut into
    balance: bool = True  # off: the ranges stay as they are at first

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1:
            raise ConfigError(f"exdyna: blocks is {self.blocks}; it must be at least 1.")

    def start(self, layout: Layout, workers: int) -> State:
        ranges = [equal_range(partition, self.blocks, workers) for partition in range(workers)]
        return {**super().start(layout, workers), "partition": torch.tensor([stop - start for start, stop in ranges])}

    def range_of(self, partition: int, step: Step) -> tuple[int, int]:
        elements, workers = len(step.memory), step.workers.size
        size = self.block_size(elements)
        if not size or self.blocks < workers:
            return equal_range(partition, elements, workers)
        ends = step.state["partition"].cumsum(0).tolist()  # in blocks
        start = size * ends[partition - 1] if partition else 0
        return start, elements if partition == workers - 1 else size * ends[partition]

    def block_size(self, elements: int) -> int:
        return elements // self.blocks // _ALIGNMENT * _ALIGNMENT

    def rearrange(self, step: Step) -> None:
        if not self.balance:
            return
        workers, chosen, elements = step.workers.size, sum(step.counts), len(step.memory)
        counts = [step.counts[(partition - (step.number - 1)) % workers] for partition in range(workers)]  # unrotated
        mean = max(1, chosen // workers)
        moved = self.block_size(elements) * chosen // elements  # elements that a block brings along
        lowest = max(1, self.blocks // (4 * workers))
        blocks = step.state["partition"].tolist()
        for left, right in zip(range(workers - 1), range(1, workers), strict=True):
            for giver, taker in ((left, right), (right, left)):
                unequal = counts[giver] > _BAND * mean and counts[taker] < mean / _BAND
                if unequal and blocks[giver] > lowest:
                    blocks[giver] -= 1
                    blocks[taker] += 1
                    counts[giver] -= moved
                    counts[taker] += moved
        step.state["partition"] = torch.tensor(blocks)
