"""Losses over a large vocabulary, computed in chunks of rows and recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from smelt.measure.logits import slices

RowLoss = Callable[[Tensor, Tensor], Tensor]  # (hidden rows, their targets) -> loss summed over the rows


def sum_in_chunks(loss: RowLoss, rows: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the loss summed over all rows, with activation checkpointing per chunk."""
    losses = [
        checkpoint(loss, rows[chunk], targets[chunk], use_reentrant=False, preserve_rng_state=False)
        for chunk in slices(len(rows), vocab_size)
    ]
    return torch.stack(losses).sum() if losses else rows.sum() * 0
