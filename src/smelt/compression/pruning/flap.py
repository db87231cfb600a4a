"""FLAP: fluctuation-based adaptive structured pruning (An et al., AAAI 2024), its adaptive (AL-AM) form.

A column's score is Var(x) * ||W column||^2 (squared once more for attention), standardized within each part so that
one global threshold serves all layers; the mean output of removed units becomes a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from smelt.compression.allocation.unit_search import KeptUnits
from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.block_inputs import capture_block_inputs
from smelt.compression.calibration.moments import Moments, block_moments
from smelt.compression.pruning.base import Scores, StructuredPruning
from smelt.errors import RecipeError
from smelt.models.anatomy import Anatomy, Part
from smelt.models.model import Model
from smelt.models.surgery import keep_units, set_output


@METHODS.register(
    "flap",
    paper="An et al., Fluctuation-based Adaptive Structured Pruning, AAAI 2024 (arXiv 2312.11983)",
    needs=("calibration data",),
)
@dataclass(frozen=True)
class Flap(StructuredPruning):
    """Use for fast pruning of large models: forward passes only, no gradients."""

    repair: str = "bias"  # bias (add the mean output of removed units), none, tune or full
    search_rule: ClassVar[str] = "threshold"
    repairs: ClassVar[tuple[str, ...]] = ("bias", "none", "tune", "full")

    def fits_bias(self, anatomy: Anatomy) -> bool:
        return self.repair == "bias" or super().fits_bias(anatomy)

    def check(self, anatomy: Anatomy) -> None:
        if any(part.kind == "channels" for part in anatomy.parts):
            raise RecipeError(
                "flap supports attention and feed-forward parts; for convolutions use fisher or magnitude."
            )
        super().check(anatomy)

    def observe(self, anatomy: Anatomy, context: MethodContext) -> list[Moments]:
        block_inputs = capture_block_inputs(anatomy, context.batches, limit=context.memory_limit, folder=context.folder)
        blocks = context.progress.track(anatomy.blocks, "flap")
        return [moments for block in blocks for moments in block_moments(block_inputs, block, advance=True)]

    def scores(self, anatomy: Anatomy, observations: list[Moments], context: MethodContext) -> Scores:
        return [
            _standardized(_fluctuation(part, moments))
            for part, moments in zip(anatomy.parts, observations, strict=True)
        ]

    def prune(
        self, model: Model, choice: KeptUnits, scores: Scores, observations: list[Moments], context: MethodContext
    ) -> dict[str, Any]:
        if self.repair != "bias":
            return super().prune(model, choice, scores, observations, context)
        for part, kept, moments in zip(model.anatomy.parts, choice, observations, strict=True):
            bias = _mean_of_removed(part, kept, moments)
            if part.output.bias is not None:
                bias = bias + part.output.bias.double()
            set_output(part, part.output.weight, bias)
            keep_units(model.network, part, kept.tolist())
        return {}


def _fluctuation(part: Part, moments: Moments) -> np.ndarray:
    columns = moments.variance * part.output.weight.detach().double().square().sum(0)
    if part.kind == "heads":
        columns = columns.square()
    fluctuation: np.ndarray = columns.view(part.units, part.columns_per_unit).mean(1).cpu().numpy()
    return fluctuation


def _standardized(values: np.ndarray) -> np.ndarray:
    spread = values.std(ddof=1) if len(values) > 1 else 0.0
    return (values - values.mean()) / spread if spread > 0 else np.zeros_like(values)


def _mean_of_removed(part: Part, kept: np.ndarray, moments: Moments) -> torch.Tensor:
    """Return the mean output of the removed units: W (mean(x) o (1 - m))."""
    removed = torch.ones(part.units, dtype=torch.float64, device=moments.mean.device)
    removed[torch.from_numpy(kept)] = 0
    mean = moments.mean * removed.repeat_interleave(part.columns_per_unit)
    return part.output.weight.detach().double() @ mean
