"""The straight-through estimator (Bengio et al., 2013)."""

from __future__ import annotations

from torch import Tensor


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return the rounded value, with the gradient of the unrounded one."""
    return rounded.detach() + (x - x.detach())
