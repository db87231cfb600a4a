"""Sums over the weights that belong to each unit of a part."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from smelt.models.anatomy import Part, Projection


def sum_by_unit(part: Part, value: Callable[[Projection], Tensor]) -> np.ndarray:
    """Add up a value a weight ([out, in, ...]) over all the rows and columns each unit owns: [units]."""
    total = torch.zeros(part.units, dtype=torch.float64, device=part.output.device)
    for writer, span in zip(part.input_projections, part.rows_per_unit, strict=True):
        total += value(writer).flatten(1).sum(1).view(part.units, span).sum(1)
    total += value(part.output).transpose(0, 1).flatten(1).sum(1).view(part.units, part.columns_per_unit).sum(1)
    return total.cpu().numpy()
