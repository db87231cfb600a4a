"""Mask tuning: one real-valued scale a kept unit, by least squares on the layer's output (Kwon et al., 2022).

`lsmr` is the paper's solver in its released form: LSMR on the normal equations with damping 1, accepted only when it
converges to scales within [-10, 10]. `ridge` is ours: the same equations with a damping that follows their scale, so
that it neither depends on the number of tokens nor gives up.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, lsmr
from torch import Tensor

from smelt.compression.calibration.least_squares import NormalEquations, unit_equations

LARGEST_SCALE = 10.0


def tune_scales(
    equations: NormalEquations, weight: Tensor, width: int, *, solver: str, damping: float, intercept: bool
) -> Tensor | None:
    """One factor a unit, or None where the paper's solver gives up."""
    gram, right = unit_equations(equations, weight, width)
    if intercept:
        gram, right = _with_intercept(gram, right, equations, weight, width)
    residual = right - gram.sum(1)
    change = lsmr_solve(gram, residual) if solver == "lsmr" else ridge_solve(gram, residual, damping)
    if change is None:
        return None
    scales = 1 + (change[:-1] if intercept else change)
    if solver == "lsmr" and float(scales.abs().max()) > LARGEST_SCALE:
        return None
    return scales


def lsmr_solve(gram: Tensor, right: Tensor) -> Tensor | None:
    """(G^2 + I)^-1 G r by LSMR in float32, or None when it does not converge."""
    if len(right) == 1:
        return right / gram[0, 0]
    matrix = gram.float()

    def product(vector: np.ndarray) -> np.ndarray:
        result: np.ndarray = (matrix @ torch.from_numpy(vector.ravel()).to(matrix)).cpu().numpy()
        return result

    operator = LinearOperator(tuple(matrix.shape), matvec=product, rmatvec=product, dtype=np.float32)
    with np.errstate(over="ignore"):  # its running estimate of the condition may leave float32
        solution, stop, *_ = lsmr(operator, right.float().cpu().numpy(), damp=1.0, atol=1e-6, btol=1e-6, conlim=1e8)
    return torch.from_numpy(np.asarray(solution)).to(gram) if stop in (0, 1, 2) else None


def ridge_solve(gram: Tensor, right: Tensor, damping: float) -> Tensor:
    """(G + damping * mean(diag G) * I)^-1 r."""
    ridge = damping * gram.diagonal().mean()
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), right)


def _with_intercept(
    gram: Tensor, right: Tensor, equations: NormalEquations, weight: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """The equations with a column of ones: a common offset that is fitted and thrown away."""
    contributions = (equations.input_sum * weight.double().sum(0)).view(-1, width).sum(1)  # [units]
    entries = equations.rows * weight.shape[0]
    corner = torch.tensor([float(entries)], dtype=gram.dtype, device=gram.device)
    gram = torch.cat([torch.cat([gram, contributions[:, None]], 1), torch.cat([contributions, corner])[None]], 0)
    return gram, torch.cat([right, equations.target_sum.sum()[None]])
