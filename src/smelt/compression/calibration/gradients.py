"""Gradients of the loss with respect to unit masks: one vector per mini-batch, weights frozen.

Memory is bounded by one mini-batch; with `checkpointing` only block inputs are kept and each block is recomputed in
the backward pass. Masks, loss and gradients are float32 in any model dtype.
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
HIDDEN_COPIES, UNIT_COPIES, LOGIT_COPIES = 7, 4, 4  # float32 tensors of each width at the peak of the backward pass
BATCHES_PER_CHECKPOINT = 8


def mask_gradients(anatomy: Anatomy, batch: Batch, *, checkpointing: bool = False) -> Tensor:
    """Return the gradient of the mini-batch's mean loss at all-ones masks, parts concatenated: [units]."""
    masks = unit_masks(anatomy, requires_grad=True)
    modules = [block.module for block in anatomy.blocks] if checkpointing else []
    with frozen(anatomy.network), masked(anatomy, masks), checkpointed(modules):
        loss = batch_loss(anatomy.network, batch)
        gradients = torch.autograd.grad(loss, masks, allow_unused=True)
    return torch.cat(
        [
            torch.zeros_like(mask) if gradient is None else gradient.float()
            for mask, gradient in zip(masks, gradients, strict=True)
        ]
    )


def gradient_bytes(
    anatomy: Anatomy, batch: int, length: int, *, checkpointing: bool = False, dtype: torch.dtype = torch.float32
) -> int:
    """Estimate the memory of one mini-batch: what autograd saves in the blocks in this dtype, and float32 logits.

    Weights are frozen, so a projection does not save its input; norms, activations, masks and attention do.
    """
    widths = [
        round(sum(part.token_fraction * part.output.in_features for part in block.parts)) for block in anatomy.blocks
    ]
    hidden = anatomy.hidden_size
    numbers = [HIDDEN_COPIES * hidden + UNIT_COPIES * width for width in widths]
    kept = sum(numbers) if not checkpointing else max(numbers) + hidden * len(numbers)
    vocabulary = getattr(anatomy.network.config, "vocab_size", 0) if anatomy.family.causal else 0
    return batch * length * (dtype.itemsize * kept + 4 * LOGIT_COPIES * vocabulary)


def batch_loss(network: nn.Module, batch: Batch) -> Tensor:
    """Return the task's mean loss on a batch, which must have labels."""
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
    """Put the network in eval mode with frozen weights inside the context; restore it afterwards."""
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    training = network.training
    network.eval()
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        network.train(training)


@contextmanager
def checkpointed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Make every module, such as a block, save only its input for the backward pass."""
    for module in modules:
        module.forward = _with_checkpointing(module.forward)  # an instance attribute that shadows the method
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _with_checkpointing(forward: Any) -> Any:
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
    """Return one gradient per mini-batch: [mini-batches, units], parts concatenated; checkpointed ones are not rerun.

    Activation checkpointing is used if a mini-batch would not fit into the memory limit otherwise.
    """
    if not batches:
        raise DataError("this step needs calibration data, and there is none.")
    largest = max(next(iter(batch.values())).shape[:2] for batch in batches)
    checkpointing = memory_limit is not None and gradient_bytes(anatomy, *largest) > memory_limit
    rows: list[np.ndarray] = []
    for start in progress.track(range(0, len(batches), BATCHES_PER_CHECKPOINT), "mask gradients"):
        name = f"gradients-{start:05d}"
        done = checkpoint.load(name)
        if done is None:
            chunk = batches[start : start + BATCHES_PER_CHECKPOINT]
            gradients = [mask_gradients(anatomy, batch, checkpointing=checkpointing) for batch in chunk]
            done = {"gradients": torch.stack(gradients)}
            checkpoint.save(name, done)
        rows.append(done["gradients"].cpu().numpy())
    return np.concatenate(rows)
