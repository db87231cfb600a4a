"""Hard threshold: everything above one level for the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smelt.train.gradients.compressor import Chosen, Independent, Step, first_threshold, require_positive


@dataclass(frozen=True)
class HardThreshold(Independent):
    """|memory| >= threshold, by default 1 / (2 sqrt k); the density drifts with the scale of the gradients."""

    name: ClassVar[str] = "threshold"
    paper: ClassVar[str] = "Sahu et al., Rethinking Gradient Sparsification as Total Error Minimization, NeurIPS 2021"

    threshold: float | None = None  # None: 1 / (2 sqrt k), k = floor(d G)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            require_positive(self.name, "threshold", self.threshold)

    def choose(self, step: Step) -> Chosen:
        elements = len(step.memory)
        threshold = self.threshold or first_threshold(self.density, elements)
        return Chosen(step.above(threshold, 0, elements))
