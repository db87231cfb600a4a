"""Magnitude pruning: remove the units with the smallest weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.pruning.base import Scores, StructuredPruning, sum_per_unit
from smelt.models.anatomy import Anatomy, Part


@METHODS.register(
    "magnitude", paper="baseline: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017 (arXiv 1608.08710)"
)
@dataclass(frozen=True)
class Magnitude(StructuredPruning):
    """Use where there is no calibration data, or as a baseline."""

    search_rule: ClassVar[str] = "uniform"

    def scores(self, anatomy: Anatomy, observations: None, context: MethodContext) -> Scores:
        return [_squared_norm(part) for part in anatomy.parts]


def _squared_norm(part: Part) -> np.ndarray:
    return sum_per_unit(part, lambda projection: projection.weight.detach().double().square())
