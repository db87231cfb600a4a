"""SliceGPT: rotate the residual stream to its principal components and cut off the last ones (Ashkboos et al., 2024).

With the weights of RMSNorm folded into the layers that read it, an orthogonal matrix Q can be multiplied into all that
writes or reads the residual stream, and the network computes the same. The columns of Q are the eigenvectors of the
second moments of what the norms put out, the largest eigenvalue first; then only the first dimensions are kept.

The paper has a Q for every block, and a matrix in each residual connection that changes from one to the next. Here one
Q, from the sum of all moments, serves all blocks: what is left is a plain network with a smaller hidden size, which
needs no further matrices and runs everywhere, at a higher loss for the same size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smelt.compression.base import (
    METHODS,
    CalibrationSize,
    Method,
    MethodContext,
    ResourceEstimate,
    UndecidedWidth,
    within,
)
from smelt.compression.budget import Budget
from smelt.compression.quantization.rotation import Rotations, check_rotatable, rotate_network, untie
from smelt.errors import BudgetError, RecipeError
from smelt.measure.cost import block_parameters
from smelt.measure.logits import eval_mode
from smelt.models.anatomy import Anatomy
from smelt.models.hidden_size import check_sliceable, slice_stream, stream_parameters
from smelt.models.model import Model


@METHODS.register(
    "slicegpt", paper="Ashkboos et al., ICLR 2024 (SliceGPT, arXiv 2401.15024)", needs=("calibration data",)
)
@dataclass(frozen=True)
class SliceGpt(Method):
    """Use to make every matrix narrower at once: a smaller hidden size, from the principal components of the stream."""

    budget: Budget = field(metadata={"example": "budget: {parameters: 0.75}"})
    multiple: int = 8  # the hidden size is a multiple of this and of the number of heads

    def __post_init__(self) -> None:
        if self.budget.measure != "parameters":
            raise RecipeError("slicegpt cuts the hidden size; give a budget of parameters, such as parameters=0.75.")
        within(self.name, "multiple", self.multiple, 1, 4096)

    def check(self, anatomy: Anatomy) -> None:
        check_rotatable(anatomy, self.name)
        check_sliceable(anatomy, self.name)
        self.hidden_size(anatomy)

    def hidden_size(self, anatomy: Anatomy) -> int:
        """Return the largest hidden size that meets the budget."""
        before, size = block_parameters(anatomy), anatomy.hidden_size
        if self.budget.keep == 1:
            return size
        multiple = math.lcm(self.multiple, int(anatomy.network.config.num_attention_heads))
        removed = math.ceil((1 - self.budget.keep) * before / stream_parameters(anatomy))
        kept = (size - removed) // multiple * multiple
        if kept < multiple:
            least = 1 - (size - multiple) * stream_parameters(anatomy) / before
            raise BudgetError(
                f"no hidden size that is a multiple of {multiple} reaches parameters={self.budget.keep:g}; allow at "
                f"least parameters={math.ceil(100 * least) / 100:g}."
            )
        return kept

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        untie(anatomy.network)
        slice_stream(anatomy, self.hidden_size(anatomy))
        return undecided

    def targets(self) -> dict[str, float]:
        return self.budget.to_json()

    def added_parameters(self, anatomy: Anatomy) -> int:
        """The head is untied from the embeddings."""
        head = anatomy.network.get_output_embeddings()
        tied = bool(anatomy.network.config.tie_word_embeddings) and head is not None
        return int(head.weight.numel()) if tied else 0

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        return ResourceEstimate(passes=1.0, memory=4 * 8 * anatomy.hidden_size**2)

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        anatomy = model.anatomy
        self.check(anatomy)
        size, before = self.hidden_size(anatomy), block_parameters(anatomy)
        saved = context.checkpoint.load("covariance")
        covariance = stream_covariance(model, context) if saved is None else saved["covariance"]
        context.checkpoint.save("covariance", {"covariance": covariance})
        rotation, energy = principal_components(covariance)
        facts = rotate_network(anatomy, Rotations(rotation))
        slice_stream(anatomy, size)
        return {
            "parameters_removed": before - block_parameters(model.anatomy),
            "block_parameters_before": before,
            "hidden_size_before": len(covariance),
            "hidden_size_after": size,
            "variance_kept": float(energy[:size].sum() / energy.sum()),
            **facts,
        }


@torch.no_grad()
def stream_covariance(model: Model, context: MethodContext) -> Tensor:
    """Return the sum over all norms of the second moments of x / rms(x), of unpadded tokens: [hidden, hidden]."""
    anatomy, network = model.anatomy, model.network
    norms = [norm for block in anatomy.blocks for norm, _ in block.norm_consumers]
    total = torch.zeros(anatomy.hidden_size, anatomy.hidden_size, dtype=torch.float64, device=model.device)
    mask: Tensor | None = None

    def add(module: Any, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach().flatten(0, -2) if mask is None else args[0].detach()[mask]
        x = x.float()
        x = x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
        total.add_((x.T @ x).double())

    hooks = [norm.register_forward_pre_hook(add) for norm in (*norms, anatomy.final_norm) if norm is not None]
    try:
        with eval_mode(network):
            for batch in context.progress.track(context.batches, "slicegpt"):
                inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name != "labels"}
                mask = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
                network(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return total.cpu()


def principal_components(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors as columns, the largest eigenvalue first, and the eigenvalues."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors.flip(1).contiguous(), values.flip(0).clamp(min=0)
