"""REAP: router-weighted expert activation pruning (Lasby et al., 2025).

The score of expert j is the mean over the tokens routed to it of g_j(x) * ||f_j(x)||_2: how much it adds to the layer's
output when it is used, whatever the number of its tokens. g_j is the weight with which the network adds the output.
The paper removes as many experts in every layer (`experts_per_layer: uniform`); across layers, scores are relative to
the mean of their layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smelt.compression.base import METHODS
from smelt.compression.calibration.expert_statistics import ExpertStatistics
from smelt.compression.pruning.expert_pruning import ExpertPruning, share_of_mixture
from smelt.models.anatomy import Anatomy


@METHODS.register(
    "reap",
    paper="Lasby et al., REAP the Experts: Why Pruning Prevails for One-Shot MoE Compression, ICLR 2026 "
    "(arXiv 2510.13999)",
    needs=("calibration data",),
)
@dataclass(frozen=True)
class Reap(ExpertPruning):
    """Use to remove experts of a mixture in one shot: forward passes only, no gradients."""

    def scores(self, anatomy: Anatomy, statistics: Sequence[ExpertStatistics], seed: int) -> list[np.ndarray]:
        return [share_of_mixture(each.mean_weighted_norms.numpy()) for each in statistics]
