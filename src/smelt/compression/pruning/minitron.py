"""Minitron's width pruning: remove the heads and FFN channels with small activations (Muralidharan et al., 2024).

The importance of an FFN channel is its mean absolute activation over a sequence, and of a head the mean norm of
its output; sequences are combined by their L2 norm. All layers get the same width. The paper also removes embedding
channels, which `slicegpt` does, and then distills; here nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.pruning.base import Scores, StructuredPruning
from smelt.errors import ModelError
from smelt.measure.logits import eval_mode
from smelt.models.anatomy import Anatomy, Part


@METHODS.register(
    "minitron", paper="Muralidharan et al., NeurIPS 2024 (Minitron, arXiv 2407.14679)", needs=("calibration data",)
)
@dataclass(frozen=True)
class Minitron(StructuredPruning):
    """Use as the baseline for equal widths in all layers, before distillation: forward passes only."""

    search_rule: ClassVar[str] = "uniform"

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if any(part.kind == "channels" or part.mixture is not None for part in anatomy.parts):
            raise ModelError("minitron scores heads and dense FFN channels; use fisher or magnitude for this network.")

    def observe(self, anatomy: Anatomy, context: MethodContext) -> list[Tensor]:
        """Return the sum over sequences of the squared mean activation of each unit, one vector per part."""
        network, device = anatomy.network, next(anatomy.network.parameters()).device
        totals = [torch.zeros(part.units, dtype=torch.float64, device=device) for part in anatomy.parts]
        mask: Tensor | None = None

        def hook(part: Part, total: Tensor) -> Any:
            def before(module: Any, args: tuple[Tensor, ...]) -> None:
                units = args[0].float().unflatten(-1, (part.units, part.columns_per_unit)).norm(dim=-1)
                weights = torch.ones(units.shape[:2], device=device) if mask is None else mask.float()
                means = (units * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)
                total.add_(means.double().square().sum(0))

            return before

        parts = [(part, total) for part, total in zip(anatomy.parts, totals, strict=True) if part.units]
        hooks = [part.output.module.register_forward_pre_hook(hook(part, total)) for part, total in parts]
        try:
            with eval_mode(network):
                for batch in context.progress.track(context.batches, "minitron"):
                    inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
                    mask = inputs.get("attention_mask")
                    network(**inputs)
        finally:
            for handle in hooks:
                handle.remove()
        return totals

    def scores(self, anatomy: Anatomy, observations: list[Tensor], context: MethodContext) -> Scores:
        values: list[np.ndarray] = [total.sqrt().cpu().numpy() for total in observations]
        return values
