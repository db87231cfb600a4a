"""Random expert pruning: a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smelt.compression.base import METHODS
from smelt.compression.calibration.expert_statistics import ExpertStatistics
from smelt.compression.pruning.expert_pruning import ExpertPruning
from smelt.models.anatomy import Anatomy


@METHODS.register("expert-random", paper="baseline")
@dataclass(frozen=True)
class ExpertRandom(ExpertPruning):
    """Use as a baseline for comparisons only: removes random experts."""

    def scores(self, anatomy: Anatomy, statistics: Sequence[ExpertStatistics], seed: int) -> list[np.ndarray]:
        generator = np.random.Generator(np.random.PCG64(seed))
        return [generator.random(mixture.num_experts) for mixture in anatomy.mixtures]
