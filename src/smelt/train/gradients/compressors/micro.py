"""MiCRO: equal ranges, one for each worker, and one threshold that keeps the number selected near its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smelt.train.gradients.compressor import Step
from smelt.train.gradients.exclusive import ExclusiveThreshold, equal_range


@dataclass(frozen=True)
class MiCRO(ExclusiveThreshold):
    """The flat vector in n equal ranges that rotate among the workers; the threshold moves by at most 0.5 % a step."""

    name: ClassVar[str] = "micro"
    paper: ClassVar[str] = (
        "Yoon and Oh, MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN "
        "Training, HiPC 2023 (arXiv 2310.00967)"
    )

    def range_of(self, partition: int, step: Step) -> tuple[int, int]:
        return equal_range(partition, len(step.memory), step.workers.size)
