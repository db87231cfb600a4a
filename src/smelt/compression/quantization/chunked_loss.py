"""Losses over a large vocabulary: logits exist for a few rows at a time, and again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from smelt.measure.logits import slices

RowLoss = Callable[[Tensor, Tensor], Tensor]  # of hidden rows and what belongs to them: a sum over the rows


def sum_in_chunks(loss: RowLoss, rows: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """The loss over all rows; what it computes on the way is kept for no more than one slice of them."""
    parts = [
        checkpoint(loss, rows[part], targets[part], use_reentrant=False, preserve_rng_state=False)
        for part in slices(len(rows), vocabulary)
    ]
    return torch.stack(parts).sum() if parts else rows.sum() * 0
