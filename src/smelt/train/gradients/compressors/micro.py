"""MiCRO: equal ranges, one per rank, and one threshold that keeps the selected count near its target."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.train.gradients.compressor import COMPRESSORS, CompressionStep
from smelt.train.gradients.exclusive import ExclusiveThreshold, even_range


@COMPRESSORS.register(
    "micro",
    paper=(
        "Yoon and Oh, MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN "
        "Training, HiPC 2023 (arXiv 2310.00967)"
    ),
)
@dataclass(frozen=True)
class MiCRO(ExclusiveThreshold):
    """The cheapest sparsifier: n equal ranges that rotate among the ranks; the threshold moves by 0.5 % per step."""

    def partition_range(self, partition: int, step: CompressionStep) -> tuple[int, int]:
        return even_range(partition, len(step.residual), step.comm.world_size)
