"""Wanda-sp: weight times activation norm, the structured version of Wanda in FLAP (An et al., AAAI 2024).

A column's score is the mean over output rows of |W| * sqrt(mean x^2); a head's is the sum over its columns. Every
layer has the same sparsity and is scored on the outputs of the layers already pruned before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from smelt.compression.allocation.unit_search import KeptUnits
from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.block_inputs import advance, capture_block_inputs
from smelt.compression.calibration.moments import Moments, block_moments
from smelt.compression.pruning.base import Scores, StructuredPruning
from smelt.models.anatomy import Anatomy, Part
from smelt.models.model import Model
from smelt.models.surgery import keep_units


@METHODS.register(
    "wanda-sp",
    paper="An et al., Fluctuation-based Adaptive Structured Pruning, AAAI 2024 (arXiv 2312.11983), baseline Wanda-sp",
    needs=("calibration data",),
)
@dataclass(frozen=True)
class WandaSp(StructuredPruning):
    """Use as a strong, simple pruning baseline with forward passes only."""

    search_rule: ClassVar[str] = "uniform"

    def scores(self, anatomy: Anatomy, observations: None, context: MethodContext) -> Scores:
        """Return zeros: uniform sparsity needs no scores here; `prune` computes them on the pruned network."""
        return [np.zeros(part.units) for part in anatomy.parts]

    def prune(
        self, model: Model, choice: KeptUnits, scores: Scores, observations: None, context: MethodContext
    ) -> dict[str, Any]:
        counts = [len(kept) for kept in choice]
        if self.repair == "none":
            self._cut_block_by_block(model, counts, context)
            return {}
        dense = self._dense_scores(model.anatomy, context)
        choice = [top_units(score, count) for score, count in zip(dense, counts, strict=True)]
        return super().prune(model, choice, scores, observations, context)

    def _cut_block_by_block(self, model: Model, counts: list[int], context: MethodContext) -> None:
        """Score each block on the outputs of the pruned blocks before it, cut it, and advance."""
        block_inputs = capture_block_inputs(
            model.anatomy, context.batches, limit=context.memory_limit, folder=context.folder
        )
        remaining = iter(counts)
        for block in context.progress.track(model.anatomy.blocks, "wanda-sp"):
            moments = block_moments(block_inputs, block)
            kept = [
                top_units(unit_scores(p, m), next(remaining)).tolist()
                for p, m in zip(block.parts, moments, strict=True)
            ]
            for part, keep in zip(block.parts, kept, strict=True):
                keep_units(model.network, part, keep)
            advance(block_inputs, block)

    def _dense_scores(self, anatomy: Anatomy, context: MethodContext) -> Scores:
        block_inputs = capture_block_inputs(anatomy, context.batches, limit=context.memory_limit, folder=context.folder)
        return [
            unit_scores(part, moments)
            for block in anatomy.blocks
            for part, moments in zip(block.parts, block_moments(block_inputs, block, advance=True), strict=True)
        ]


def unit_scores(part: Part, moments: Moments) -> np.ndarray:
    weight = part.output.weight.detach().double()
    if weight.dim() > 2:  # a convolution's column is a kernel
        weight = weight.abs().sum(tuple(range(2, weight.dim())))
    columns = weight.abs().mean(0) * moments.square.sqrt()
    scores: np.ndarray = columns.view(part.units, part.columns_per_unit).sum(1).cpu().numpy()
    return scores


def top_units(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the highest scores, ascending."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])
