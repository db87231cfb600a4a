"""Normal equations of one part: the statistics for a least-squares repair of its output projection.

With input rows H and target rows B they hold H'H and H'B but never H, so memory does not grow with the number of
tokens. Products are float32, sums float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class NormalEquations:
    """H'H [inputs, inputs], H'B [inputs, outputs], the sums of H and B over rows, and the number of rows."""

    gram: Tensor
    cross: Tensor
    input_sum: Tensor
    target_sum: Tensor
    rows: int = 0

    @classmethod
    def zeros(cls, inputs: int, outputs: int, device: torch.device) -> NormalEquations:
        def blank(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        return cls(blank(inputs, inputs), blank(inputs, outputs), blank(inputs), blank(outputs))

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Add rows: inputs [rows, inputs], targets [rows, outputs]."""
        inputs, targets = inputs.float(), targets.float()
        self.gram += inputs.T @ inputs
        self.cross += inputs.T @ targets
        self.input_sum += inputs.sum(0, dtype=torch.float64)
        self.target_sum += targets.sum(0, dtype=torch.float64)
        self.rows += len(inputs)

    def centered(self) -> tuple[Tensor, Tensor]:
        """Return the Gram and cross products of centered rows: the equations of a fit with an intercept."""
        mean = self.input_sum / max(self.rows, 1)
        return self.gram - torch.outer(mean, self.input_sum), self.cross - torch.outer(mean, self.target_sum)


def unit_equations(equations: NormalEquations, weight: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the equations for one scale per unit: A'A [units, units] and A'b [units], A the units' contributions.

    A'A = (W'W) o (H'H), summed over the inputs of each unit; A itself is never materialized.
    """
    weight = weight.double()  # [outputs, inputs]
    products = (weight.T @ weight) * equations.gram
    units = weight.shape[1] // width
    gram = products.view(units, width, units, width).sum((1, 3))
    right = (equations.cross * weight.T).sum(1).view(units, width).sum(1)
    return gram, right
