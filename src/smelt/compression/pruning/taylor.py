"""First-order Taylor pruning with dependency groups: LLM-Pruner (Ma et al., NeurIPS 2023), its `param_first` form.

The importance of a weight is |w * dL/dw|; that of a unit is the sum over all weights removed with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from smelt.compression.base import METHODS, CalibrationSize, MethodContext, ResourceEstimate
from smelt.compression.calibration.gradients import batch_loss, frozen, gradient_bytes
from smelt.compression.pruning.base import Scores, StructuredPruning, sum_per_unit
from smelt.errors import DataError
from smelt.measure.cost import block_parameters
from smelt.models.anatomy import Anatomy, Projection


@METHODS.register(
    "taylor",
    paper="Ma et al., LLM-Pruner: On the Structural Pruning of Large Language Models, NeurIPS 2023 (arXiv 2305.11627)",
    needs=("calibration data", "labels or text", "gradients"),
)
@dataclass(frozen=True)
class Taylor(StructuredPruning):
    """Use to prune as LLM-Pruner does, where memory for the gradients of all weights is available."""

    search_rule: ClassVar[str] = "uniform"

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        """Estimate gradients as large as the weights, plus the saved activations of one mini-batch."""
        repair = super().estimate_resources(anatomy, size, memory_limit)
        memory = 2 * 4 * block_parameters(anatomy) + 2 * gradient_bytes(anatomy, size.batch_size, size.seq_len)
        return ResourceEstimate(repair.passes + 3.5, max(repair.memory, memory))

    def observe(self, anatomy: Anatomy, context: MethodContext) -> None:
        """Accumulate the gradient of the mean loss over all batches in the weights of units."""
        if not context.batches:
            raise DataError("taylor needs calibration data, and there is none.")
        weights = [p.module.weight for part in anatomy.parts for p in (*part.input_projections, part.output)]
        with frozen(anatomy.network):
            _clear(weights)
            for weight in weights:
                weight.requires_grad_(True)
            for batch in context.progress.track(context.batches, "weight gradients"):
                (batch_loss(anatomy.network, batch) / len(context.batches)).backward()
            for weight in weights:
                weight.requires_grad_(False)

    def scores(self, anatomy: Anatomy, observations: None, context: MethodContext) -> Scores:
        scores = [sum_per_unit(part, _first_order) for part in anatomy.parts]
        _clear([p.module.weight for part in anatomy.parts for p in (*part.input_projections, part.output)])
        return scores


def _first_order(projection: Projection) -> torch.Tensor:
    gradient = projection.module.weight.grad
    if gradient is None:  # an expert that no token reached
        gradient = torch.zeros_like(projection.module.weight)
    product: torch.Tensor = (projection.module.weight.detach() * gradient).abs().double()
    product = product.T if projection.transposed else product
    return product[projection.slice]


def _clear(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = None
