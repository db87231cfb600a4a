"""Hard threshold: every element above one fixed threshold for the whole run."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.train.gradients.compressor import (
    COMPRESSORS,
    CompressionStep,
    IndependentSparsifier,
    SelectedIndices,
    initial_threshold,
    require_positive,
)


@COMPRESSORS.register(
    "threshold", paper="Sahu et al., Rethinking Gradient Sparsification as Total Error Minimization, NeurIPS 2021"
)
@dataclass(frozen=True)
class HardThreshold(IndependentSparsifier):
    """The best loss per step if bytes may vary: |residual| >= threshold; the density drifts with the gradients."""

    threshold: float | None = None  # None: 1 / (2 sqrt k), k = floor(d G)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            require_positive(self.name, "threshold", self.threshold)

    def select(self, step: CompressionStep) -> SelectedIndices:
        numel = len(step.residual)
        threshold = self.threshold or initial_threshold(self.density, numel)
        return SelectedIndices(step.select_above(threshold, 0, numel))
