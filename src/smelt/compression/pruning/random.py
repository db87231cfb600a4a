"""Random pruning: a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.pruning.base import Scores, StructuredPruning
from smelt.models.anatomy import Anatomy


@METHODS.register("random", paper="baseline")
@dataclass(frozen=True)
class Random(StructuredPruning):
    """Use as a baseline for comparisons only: prunes random units."""

    search_rule: ClassVar[str] = "uniform"

    def scores(self, anatomy: Anatomy, observations: None, context: MethodContext) -> Scores:
        generator = np.random.Generator(np.random.PCG64(context.seed))
        return [generator.random(part.units) for part in anatomy.parts]
