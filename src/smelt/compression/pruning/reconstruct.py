"""Full reconstruction: solve for the whole output projection, not one scale a unit (K-prune, SlimGPT, FASP).

W' = argmin ||H W' - B||^2 + lambda ||W' - W||^2 with lambda = damping * mean(diag H'H): a ridge that pulls towards the
weights that are there and not towards nothing. With an intercept the bias is fitted too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compression.calibration.least_squares import NormalEquations


def reconstruct(
    equations: NormalEquations, weight: Tensor, *, damping: float, intercept: bool
) -> tuple[Tensor, Tensor | None]:
    """The new weight [outputs, inputs] and, with an intercept, the new bias in full."""
    gram, cross = equations.centred() if intercept else (equations.gram, equations.cross)
    old = weight.double().T  # [inputs, outputs]
    ridge = damping * gram.diagonal().mean().clamp(min=1e-12)
    system = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    new = old + torch.cholesky_solve(cross - gram @ old, torch.linalg.cholesky(system))
    if not intercept:
        return new.T, None
    bias = (equations.target_sum - equations.input_sum @ new) / max(equations.rows, 1)
    return new.T, bias
