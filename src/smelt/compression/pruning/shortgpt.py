"""ShortGPT: remove the blocks that change their input least (Men et al., 2024).

The Block Influence of a block is 1 - E[cos(x, y)] over tokens, where x enters the block and y leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.compression.base import METHODS, Batch, CalibrationSize, MethodContext, ResourceEstimate
from smelt.compression.pruning.depth import DepthPruning
from smelt.measure.logits import eval_mode
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model


@METHODS.register("shortgpt", paper="Men et al., 2024 (ShortGPT, arXiv 2403.03853)", needs=("calibration data",))
@dataclass(frozen=True)
class ShortGpt(DepthPruning):
    """Use where latency per layer counts: whole blocks go, and any program opens the result."""

    def importance(self, model: Model, context: MethodContext) -> np.ndarray:
        return block_influence(model, context)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        return ResourceEstimate(passes=1.0)


def block_influence(model: Model, context: MethodContext) -> np.ndarray:
    """Return 1 - the mean cosine of input and output of each block over unpadded tokens, [blocks]."""
    blocks, network = model.anatomy.blocks, model.network
    sums, tokens = torch.zeros(2, len(blocks), dtype=torch.float64)
    mask: Tensor | None = None

    def add(index: int, x: Tensor, y: Tensor) -> None:
        cosines = F.cosine_similarity(x.double(), y.double(), dim=-1)  # [batch, tokens]
        weights = torch.ones_like(cosines) if mask is None else mask  # an image has no mask
        sums[index] += float((cosines * weights).sum())
        tokens[index] += float(weights.sum())

    with eval_mode(network), _observed(blocks, add):
        for batch in context.progress.track(context.batches, "shortgpt"):
            inputs = _inputs(batch, model.device)
            mask = inputs.get("attention_mask")
            network(**inputs)
    return (1 - sums / tokens.clamp(min=1)).numpy()


def _inputs(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}


@contextmanager
def _observed(blocks: Any, add: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
    """Call `add` with the number, input and output of every block that runs."""

    def hook(index: int) -> Any:
        def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            add(index, x, output[0] if isinstance(output, tuple) else output)

        return after

    handles = [block.module.register_forward_hook(hook(block.index), with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
