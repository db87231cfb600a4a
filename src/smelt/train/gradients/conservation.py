"""Debug check that no gradient is lost: applied gradients and residuals add up to all gradients of all ranks.

Costs two more float64 vectors and one dense all-reduce per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.train.gradients.comm import Comm

TOLERANCE = 1e-5  # relative to the largest accumulated gradient


class ConservationCheck:
    """Running sums of one bucket."""

    def __init__(self, like: Tensor) -> None:
        self.gradients = torch.zeros_like(like, dtype=torch.float64)  # sum over steps, of this rank
        self.applied = torch.zeros_like(like, dtype=torch.float64)  # sum over steps and ranks

    def add(self, gradient: Tensor, applied: Tensor) -> None:
        self.gradients += gradient
        self.applied += applied

    def tensors(self) -> dict[str, Tensor]:
        return {"check.given": self.gradients, "check.applied": self.applied}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.gradients.copy_(tensors["check.given"])
        self.applied.copy_(tensors["check.applied"])

    def error(self, residual: Tensor, comm: Comm) -> float:
        """Return max |gradients - applied - residuals| / max |gradients|, summed over ranks; equal on every rank."""
        both = torch.stack([self.gradients, residual.double()])  # [2, numel]
        before = comm.bytes_received.copy()
        gradients, residuals = comm.all_reduce(both, "debug")
        comm.bytes_received = before  # the check itself is not traffic of the method
        largest = float(gradients.abs().amax())
        difference = float((gradients - self.applied - residuals).abs().amax())
        return difference / largest if largest else difference

    def require(self, residual: Tensor, comm: Comm) -> None:
        error = self.error(residual, comm)
        if not error <= TOLERANCE:
            raise RuntimeError(f"gradients were lost or added: the sums differ by {error:.1e} of the largest one")
