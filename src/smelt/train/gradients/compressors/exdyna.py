"""ExDyna: MiCRO with ranges made of small blocks, which move between neighbors until the counts are even."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import COMPRESSORS, CompressionStep, CompressorState
from smelt.train.gradients.exclusive import ExclusiveThreshold, even_range
from smelt.train.gradients.layout import BucketLayout

_ALIGNMENT = 32  # elements that a block's size is a multiple of
_BAND = 1.05  # a partition this far above the mean gives a block to a neighbor this far below it


@COMPRESSORS.register(
    "exdyna",
    paper=(
        "Yoon and Oh, Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning, "
        "CCGrid 2024 (arXiv 2402.13781)"
    ),
)
@dataclass(frozen=True)
class ExDyna(ExclusiveThreshold):
    """The default choice on slow links: a steady density, no build-up and the least padding of indices.

    Per step one block moves between a full partition and a poor one beside it; no partition falls below a quarter of
    its first size. A bucket too short for `blocks` blocks of 32 elements is split as MiCRO splits it."""

    blocks: int = 1024  # that the bucket is split into
    balance: bool = True  # off: the ranges stay as they are at first

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1:
            raise ConfigError(f"exdyna: blocks is {self.blocks}; it must be at least 1.")

    def init_state(self, layout: BucketLayout, world_size: int) -> CompressorState:
        ranges = [even_range(partition, self.blocks, world_size) for partition in range(world_size)]
        blocks = torch.tensor([stop - start for start, stop in ranges])
        return {**super().init_state(layout, world_size), "partition": blocks}

    def partition_range(self, partition: int, step: CompressionStep) -> tuple[int, int]:
        numel, world_size = len(step.residual), step.comm.world_size
        size = self.block_size(numel)
        if not size or self.blocks < world_size:
            return even_range(partition, numel, world_size)
        ends = step.state["partition"].cumsum(0).tolist()  # in blocks
        start = size * ends[partition - 1] if partition else 0
        return start, numel if partition == world_size - 1 else size * ends[partition]

    def block_size(self, numel: int) -> int:
        return numel // self.blocks // _ALIGNMENT * _ALIGNMENT

    def rebalance(self, step: CompressionStep) -> None:
        if not self.balance:
            return
        world_size, num_selected, numel = step.comm.world_size, sum(step.counts), len(step.residual)
        previous = step.iteration - 1
        counts = [step.counts[(partition - previous) % world_size] for partition in range(world_size)]  # unrotated
        mean = max(1, num_selected // world_size)
        moved = self.block_size(numel) * num_selected // numel  # elements that a block brings along
        lowest = max(1, self.blocks // (4 * world_size))
        blocks = step.state["partition"].tolist()
        for left, right in zip(range(world_size - 1), range(1, world_size), strict=True):
            for source, target in ((left, right), (right, left)):
                uneven = counts[source] > _BAND * mean and counts[target] < mean / _BAND
                if uneven and blocks[source] > lowest:
                    blocks[source] -= 1
                    blocks[target] += 1
                    counts[source] -= moved
                    counts[target] += moved
        step.state["partition"] = torch.tensor(blocks)
