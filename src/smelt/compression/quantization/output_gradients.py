"""Gradients of a prediction's divergence with respect to the output of a block (BRECQ's Fisher weighting).

With the output z of the quantized block, p the prediction of the original network and q(z) that of the blocks and the
head behind it, the gradient is that of KL(p || q(z)), summed over images or tokens. Its squares are the diagonal of the
empirical Fisher information: an element of z counts by how much the prediction depends on it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.compression.calibration.block_inputs import (
    ActivationStore,
    BlockInputs,
    block_output,
    forward_arguments,
    replaced_forward,
)
from smelt.compression.calibration.gradients import checkpointed, frozen
from smelt.compression.quantization.block_work import BlockWork
from smelt.compression.quantization.chunked_loss import sum_in_chunks
from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model

Batch = dict[str, Tensor]

_NO_CLASSES = ("embedding", "sequence-to-sequence")  # tasks
_NO_DISTRIBUTION = ("regression", "multi_label_classification")  # problem types, of which softmax is not the prediction


class FisherWeights:
    """The weights of a block's reconstruction error: squared gradients with a mean of 1, one tensor per batch."""

    def __init__(self, work: BlockWork) -> None:
        assert work.block_inputs is not None and work.targets is not None
        self._anatomy, self._index, self._batches = anatomy_of(work.network), work.block.index, work.context.batches
        self._inputs, self._targets = work.block_inputs, work.targets
        self._gradients = ActivationStore(work.context.memory_limit, work.context.folder)
        self._mean = 1.0  # of all squares, without padding

    def measure(self, output: Callable[[int], Tensor]) -> None:
        """Set the weights from the gradients at `output`, which returns the block's output on a batch."""
        total, count = 0.0, 0
        for batch in range(len(self._inputs)):
            with torch.no_grad():
                quantized, target = output(batch), self._targets[batch]
            mask = self._inputs.masks[batch]
            gradient = output_gradient(
                self._anatomy, self._batches[batch], self._inputs, self._index, quantized.to(target.dtype), target, mask
            )
            self._gradients[batch] = gradient
            squares = gradient.float().square() if mask is None else gradient[mask].float().square()
            total, count = total + float(squares.double().sum()), count + squares.numel()
        self._mean = total / count

    def __getitem__(self, batch: int) -> Tensor:
        """Return the weights of a batch, like the block's output; all 1 if no element changes the prediction."""
        gradient = self._gradients[batch].float()
        return gradient.square() / self._mean if self._mean else torch.ones_like(gradient)


def check_predicts_classes(anatomy: Anatomy) -> None:
    """Raise unless the network predicts a distribution over classes or tokens."""
    network = anatomy.network
    task, problem = Model(network).task, getattr(network.config, "problem_type", None)
    one_class = task in ("classification", "images") and network.config.num_labels < 2
    continuous = task == "policy" and network.config.action_space != "discrete"
    if task in _NO_CLASSES or problem in _NO_DISTRIBUTION or one_class or continuous:
        raise ModelError(
            f"Fisher weighting compares predictions of classes or tokens, and {type(network).__name__} with this "
            "config makes none; use `weighting: none`."
        )


def output_gradient(
    anatomy: Anatomy, batch: Batch, block_inputs: BlockInputs, index: int, output: Tensor, target: Tensor,
    mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradient of KL(prediction from `target` || prediction from `output`) with respect to `output`.

    `output` and `target` are those of the quantized and the original block at this index, on the same batch. Only the
    blocks after it run, each recomputed in the backward pass. `mask`: unpadded tokens, which alone count.
    """
    network = anatomy.network
    device = next(network.parameters()).device
    before, after = (
        [block.module for block in anatomy.blocks if (block.index > index) == later] for later in (False, True)
    )

    def logits(hidden: Tensor) -> Tensor:
        with replaced_forward(before, lambda *args, **kwargs: block_output(hidden, block_inputs.tuple_size)):
            result: Tensor = network(**forward_arguments(network, batch)).logits
        if mask is not None and result.shape[:-1] == mask.shape:
            return result[mask.to(device)]
        return result.flatten(0, -2)

    with frozen(network):
        with torch.no_grad():
            expected = logits(target.to(device))
        leaf = output.detach().to(device).requires_grad_()
        with torch.enable_grad(), checkpointed(after):
            divergence = sum_in_chunks(_divergence, logits(leaf), expected, expected.shape[-1])
            (gradient,) = torch.autograd.grad(divergence, leaf)
    return gradient.to(output.device)


def _divergence(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the sum of KL(softmax(expected) || softmax(logits)) over the rows."""
    return F.kl_div(logits.float().log_softmax(-1), expected.float().log_softmax(-1), reduction="sum", log_target=True)
