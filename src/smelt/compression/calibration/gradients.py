"""Gradients of the loss with respect to unit masks: one vector a mini-batch, weights frozen.

Memory is bounded by one mini-batch: with `checkpointing` only the blocks' inputs are kept and each block is run again
in the backward pass. Masks, loss and gradients are float32 whatever the network computes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smelt.compression.calibration.masks import masked, unit_masks
from smelt.compression.checkpoint import Checkpoint
from smelt.errors import DataError
from smelt.models.anatomy import Anatomy
from smelt.progress import Progress

Batch = dict[str, Tensor]
HIDDEN_COPIES, UNIT_COPIES, LOGIT_COPIES = 7, 4, 4  # float32 tensors of each width that live at the peak of a backward
BATCHES_A_PIECE = 8  # so many mini-batches are kept in the checkpoint together


def mask_gradients(anatomy: Anatomy, batch: Batch, *, checkpointing: bool = False) -> Tensor:
    """The gradient of the mini-batch's mean loss in all masks at one, parts end to end: [units]."""
    masks = unit_masks(anatomy, requires_grad=True)
    with frozen(anatomy.network), masked(anatomy, masks), _checkpointed(anatomy, checkpointing):
        loss = batch_loss(anatomy.network, batch)
        gradients = torch.autograd.grad(loss, masks, allow_unused=True)
    return torch.cat(
        [
            torch.zeros_like(mask) if gradient is None else gradient.float()
            for mask, gradient in zip(masks, gradients, strict=True)
        ]
    )


def gradient_bytes(anatomy: Anatomy, batch: int, length: int, *, checkpointing: bool = False) -> int:
    """About how much memory one mini-batch of gradients takes: what autograd keeps of the blocks, and the logits.

    Weights are frozen, so a projection keeps nothing of its input; norms, activations, masks and attention do.
    """
    widths = [
        round(sum(part.token_fraction * part.output.in_features for part in block.parts)) for block in anatomy.blocks
    ]
    hidden = anatomy.parts[0].output.out_features
    numbers = [HIDDEN_COPIES * hidden + UNIT_COPIES * width for width in widths]
    kept = sum(numbers) if not checkpointing else max(numbers) + hidden * len(numbers)
    vocabulary = getattr(anatomy.network.config, "vocab_size", 0) if anatomy.family.causal else 0
    return 4 * batch * length * (kept + LOGIT_COPIES * vocabulary)


def batch_loss(network: nn.Module, batch: Batch) -> Tensor:
    """The task's own mean loss on a batch; the batch must carry labels."""
    if "labels" not in batch:
        raise DataError("this step needs labels, and the calibration data has none; name the label column or use text.")
    device = next(network.parameters()).device
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    options = {"use_cache": False} if "input_ids" in batch and hasattr(network.config, "use_cache") else {}
    loss: Tensor = network(**inputs, **options).loss.float()
    if not torch.isfinite(loss):
        raise DataError("the loss on the calibration data is not a finite number; check the data and the weights.")
    return loss


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """The network in eval mode with no weight asking for a gradient, and afterwards as it was."""
    wanted = [parameter for parameter in network.parameters() if parameter.requires_grad]
    training = network.training
    network.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        network.train(training)


@contextmanager
def _checkpointed(anatomy: Anatomy, enabled: bool) -> Iterator[None]:
    """Every block keeps only its input for the backward pass."""
    modules: Sequence[nn.Module] = [block.module for block in anatomy.blocks] if enabled else []
    for module in modules:
        module.forward = _rerun(module.forward)  # an instance attribute that shadows the method
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _rerun(forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def all_mask_gradients(
    anatomy: Anatomy,
    batches: Sequence[Batch],
    progress: Progress,
    checkpoint: Checkpoint,
    memory_limit: int | None = None,
) -> np.ndarray:
    """One gradient a mini-batch: [mini-batches, units], parts end to end. Finished mini-batches are not run again.

    Blocks are run twice (checkpointing) where a mini-batch would not fit into the limit otherwise.
    """
    if not batches:
        raise DataError("this step needs calibration data, and there is none.")
    largest = max(next(iter(batch.values())).shape[:2] for batch in batches)
    checkpointing = memory_limit is not None and gradient_bytes(anatomy, *largest) > memory_limit
    rows: list[np.ndarray] = []
    for start in progress.track(range(0, len(batches), BATCHES_A_PIECE), "gradients of the masks"):
        name = f"gradients-{start:05d}"
        done = checkpoint.load(name)
        if done is None:
            piece = batches[start : start + BATCHES_A_PIECE]
            gradients = [mask_gradients(anatomy, batch, checkpointing=checkpointing) for batch in piece]
            done = {"gradients": torch.stack(gradients)}
            checkpoint.save(name, done)
        rows.append(done["gradients"].cpu().numpy())
    return np.concatenate(rows)
