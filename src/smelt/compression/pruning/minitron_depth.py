"""Minitron's depth pruning: remove the blocks whose absence raises the loss least (Muralidharan et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.compression.base import METHODS, CalibrationSize, MethodContext, ResourceEstimate
from smelt.compression.pruning.depth import DepthPruning
from smelt.errors import DataError
from smelt.measure.logits import eval_mode
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model


@METHODS.register(
    "minitron-depth",
    paper="Muralidharan et al., NeurIPS 2024 (Minitron, arXiv 2407.14679)",
    needs=("calibration data", "labels"),
)
@dataclass(frozen=True)
class MinitronDepth(DepthPruning):
    """Use as `shortgpt` with a pass over the data for every block: it measures what each block is worth."""

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        return ResourceEstimate(passes=float(len(anatomy.blocks) + 1))

    def importance(self, model: Model, context: MethodContext) -> np.ndarray:
        """Return the loss without each block minus that of the whole network, [blocks]."""
        if any("labels" not in batch for batch in context.batches):
            raise DataError(f"{self.name} measures the loss, and the data has no labels; name labeled data or text.")
        blocks, network = model.anatomy.blocks, model.network
        with eval_mode(network):
            whole, losses = _loss(model, context), []
            for block in context.progress.track(blocks, self.name):
                handle = block.module.register_forward_hook(_skip, with_kwargs=True)
                try:
                    losses.append(_loss(model, context))
                finally:
                    handle.remove()
        return np.array(losses) - whole


def _loss(model: Model, context: MethodContext) -> float:
    batches = [{name: tensor.to(model.device) for name, tensor in batch.items()} for batch in context.batches]
    return float(sum(float(model.network(**batch).loss) * len(batch["labels"]) for batch in batches)) / max(
        sum(len(batch["labels"]) for batch in batches), 1
    )


def _skip(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return what entered a block in place of what it computed."""
    x = args[0] if args else kwargs["hidden_states"]
    return (x, *output[1:]) if isinstance(output, tuple) else x
