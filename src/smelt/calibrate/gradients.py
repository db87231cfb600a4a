"""Gradients of the loss with respect to unit masks: one vector a mini-batch, weights frozen.

Memory is bounded by one mini-batch: with `checkpointing` only the blocks' inputs are kept and each block is run again
in the backward pass. Masks, loss and gradients are float32 whatever the network computes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smelt.calibrate.masks import masked, unit_masks
from smelt.checkpoint import Checkpoint
from smelt.errors import DataError
from smelt.models.anatomy import Anatomy
from smelt.progress import Watcher

Batch = dict[str, Tensor]
HIDDEN_COPIES, UNIT_COPIES, LOGIT_COPIES = 7, 4, 4  # float32 tensors of each width that live at the peak of a backward
BATCHES_A_PIECE = 8  # so many mini-batches are kept in the checkpoint together


@dataclass(frozen=True)
class Sensitivity:
    """What one backward pass tells: the gradient in every mask, and how much the loss feels each token of each part.

    `masks` has parts end to end: [units]. `tokens` is the squared norm of the gradient at what each part adds to the
    residual: [parts, sequences, tokens], or None where parts are convolutions.
    """

    masks: Tensor
    tokens: Tensor | None


def sensitivity(anatomy: Anatomy, batch: Batch, *, checkpointing: bool = False) -> Sensitivity:
    """Gradients of the mini-batch's mean loss, all masks at one."""
    masks = unit_masks(anatomy, requires_grad=True)
    with (
        frozen(anatomy.network),
        masked(anatomy, masks),
        _checkpointed(anatomy, checkpointing),
        _feeling(anatomy) as felt,
    ):
        loss = batch_loss(anatomy.network, batch)
        gradients = torch.autograd.grad(loss, masks, allow_unused=True)
    flat = [
        torch.zeros_like(mask) if gradient is None else gradient.float()
        for mask, gradient in zip(masks, gradients, strict=True)
    ]
    shape = batch["input_ids"].shape if "input_ids" in batch else None
    return Sensitivity(torch.cat(flat), None if shape is None else _stacked(felt, shape))


@contextmanager
def _feeling(anatomy: Anatomy) -> Iterator[dict[int, Tensor]]:
    """Note, for each part, the squared norm of the gradient at its output, as the backward pass goes by."""
    felt: dict[int, Tensor] = {}

    def listen(position: int) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: felt.update({position: gradient.float().square().sum(-1)}))

        return hook

    hooks = [part.output.module.register_forward_hook(listen(i)) for i, part in enumerate(anatomy.parts)]
    try:
        yield felt
    finally:
        for hook in hooks:
            hook.remove()


def _stacked(felt: dict[int, Tensor], shape: torch.Size) -> Tensor:
    parts = max(felt, default=-1) + 1
    blank = torch.zeros(shape, device=next(iter(felt.values())).device if felt else None)
    return torch.stack([felt[i].view(shape) if i in felt else blank for i in range(parts)])


def gradient_bytes(anatomy: Anatomy, batch: int, length: int, *, checkpointing: bool = False) -> int:
    """About how much memory one mini-batch of gradients takes: what autograd keeps of the blocks, and the logits.

    Weights are frozen, so a projection keeps nothing of its input; norms, activations, masks and attention do.
    """
    widths = [sum(part.output.columns for part in block.parts) for block in anatomy.blocks]
    hidden = anatomy.parts[0].output.rows
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


def sensitivities(
    anatomy: Anatomy,
    batches: Sequence[Batch],
    watcher: Watcher,
    checkpoint: Checkpoint,
    memory_limit: int | None = None,
) -> list[Sensitivity]:
    """One for every mini-batch. Finished ones are not run again.

    Blocks are run twice (checkpointing) where a mini-batch would not fit into the limit otherwise.
    """
    if not batches:
        raise DataError("this step needs calibration data, and there is none.")
    largest = max(next(iter(batch.values())).shape[:2] for batch in batches)
    checkpointing = memory_limit is not None and gradient_bytes(anatomy, *largest) > memory_limit
    found: list[Sensitivity] = []
    for start in watcher.track(range(0, len(batches), BATCHES_A_PIECE), "gradients of the masks"):
        name = f"gradients-{start:05d}"
        piece = batches[start : start + BATCHES_A_PIECE]
        done = checkpoint.load(name)
        if done is None:
            made = [sensitivity(anatomy, batch, checkpointing=checkpointing) for batch in piece]
            done = {f"{i}.masks": one.masks for i, one in enumerate(made)}
            done |= {f"{i}.tokens": one.tokens for i, one in enumerate(made) if one.tokens is not None}
            checkpoint.save(name, done)
        found += [Sensitivity(done[f"{i}.masks"], done.get(f"{i}.tokens")) for i in range(len(piece))]
    return found


def token_weights(found: Sequence[Sensitivity], part: int) -> list[Tensor]:
    """How much each token counts in a fit of a part, a batch: its share of what the loss feels in its sequence.

    Sequences count alike, so that a few uncertain ones do not decide everything. [sequences, tokens] each, mean 1.
    """
    weights = []
    for one in found:
        assert one.tokens is not None
        felt = one.tokens[part]
        total = felt.sum(1, keepdim=True)
        even = torch.ones_like(felt)
        weights.append(torch.where(total > 0, felt * felt.shape[1] / total.clamp(min=1e-38), even))
    return weights
