"""The normal equations of one part: all that any least-squares repair of its output projection needs.

With rows H (what enters the projection) and B (what it should give), they hold H'H and H'B and never H itself, so
memory does not grow with the number of tokens. Products are float32, sums float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class NormalEquations:
    """H'H [inputs, inputs], H'B [inputs, outputs], the sums of H and B over rows, and how many rows there were."""

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

    def centred(self) -> tuple[Tensor, Tensor]:
        """Gram and cross products of rows less their mean: the equations of a fit with a free intercept."""
        mean = self.input_sum / max(self.rows, 1)
        return self.gram - torch.outer(mean, self.input_sum), self.cross - torch.outer(mean, self.target_sum)


def unit_equations(equations: NormalEquations, weight: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The equations for one scale a unit: A'A [units, units] and A'b [units], A being the units' contributions.

    A'A = (W'W) o (H'H), summed over the inputs each unit owns; A is never built.
    """
    weight = weight.double()  # [outputs, inputs]
    products = (weight.T @ weight) * equations.gram
    units = weight.shape[1] // width
    gram = products.view(units, width, units, width).sum((1, 3))
    right = (equations.cross * weight.T).sum(1).view(units, width).sum(1)
    return gram, right
