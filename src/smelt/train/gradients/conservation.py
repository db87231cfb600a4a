"""Nothing is lost: what was applied and what the workers still hold add up to all gradients that were given.

A debug mode: two more float64 vectors and one dense all-reduce a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.train.gradients.comm import Workers

TOLERANCE = 1e-5  # of the largest sum of gradients


class Conservation:
    """The account of one flat vector."""

    def __init__(self, like: Tensor) -> None:
        self.given = torch.zeros_like(like, dtype=torch.float64)  # sum over steps, of this worker
        self.applied = torch.zeros_like(like, dtype=torch.float64)  # sum over steps and workers

    def add(self, given: Tensor, applied: Tensor) -> None:
        self.given += given
        self.applied += applied

    def tensors(self) -> dict[str, Tensor]:
        return {"check.given": self.given, "check.applied": self.applied}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.given.copy_(tensors["check.given"])
        self.applied.copy_(tensors["check.applied"])

    def error(self, residual: Tensor, workers: Workers) -> float:
        """Largest |sum of given - applied - residuals| over the largest |sum of given|; the same on every worker."""
        both = torch.stack([self.given, residual.double()])  # [2, elements]
        before = workers.arrived.copy()
        given, left = workers.sum(both, "debug")
        workers.arrived = before  # what only this check sends is not traffic of the method
        largest = float(given.abs().amax())
        difference = float((given - self.applied - left).abs().amax())
        return difference / largest if largest else difference

    def require(self, residual: Tensor, workers: Workers) -> None:
        error = self.error(residual, workers)
        if not error <= TOLERANCE:
            raise RuntimeError(f"gradients were lost or made up: the sums differ by {error:.1e} of the largest one")
