"""Frequency-based expert pruning: keep the experts that the most calibration tokens are routed to (SEER-MoE, 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smelt.compression.base import METHODS
from smelt.compression.calibration.expert_statistics import ExpertStatistics
from smelt.compression.pruning.expert_pruning import ExpertPruning, share_of_mixture
from smelt.models.anatomy import Anatomy


@METHODS.register(
    "expert-frequency",
    paper="Muzio et al., SEER-MoE: Sparse Expert Efficiency through Regularization for Mixture-of-Experts, 2024 "
    "(arXiv 2404.05089), its heavy-hitters counting",
    needs=("calibration data",),
)
@dataclass(frozen=True)
class ExpertFrequency(ExpertPruning):
    """Use as a baseline for reap, or to specialize a mixture in the domain of the calibration data."""

    def scores(self, anatomy: Anatomy, statistics: Sequence[ExpertStatistics], seed: int) -> list[np.ndarray]:
        return [share_of_mixture(each.tokens.numpy()) for each in statistics]
