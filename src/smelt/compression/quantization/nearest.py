"""Rounding to the nearest value of a grid, and the search for a grid's range (of the GPTQ authors' code, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.numerics.format import Format, QuantizedTensor, QuantParams

SHRINKS = 80  # steps of the range search, from 1 down to 0.2
POWER = 2.4  # of the error it minimises


def nearest(weight: Tensor, number_format: Format, search: bool = False) -> QuantizedTensor:
    """A matrix on its own grid."""
    if not search:
        return number_format.quantize(weight.detach())
    grouped = number_format.split_groups(weight.detach())
    grid = searched_grid(grouped, number_format, number_format.tensor_amax(weight))
    codes = number_format.quantize_groups(grouped, grid).flatten(-2)[..., : weight.shape[1]]
    return QuantizedTensor(number_format, codes, grid)


def searched_grid(grouped: Tensor, number_format: Format, whole: Tensor | None = None) -> QuantParams:
    """Of grids with a narrowed range, the one of least |error|^2.4 for each group [..., groups, size]."""
    best, least = number_format.compute_qparams(grouped, tensor_amax=whole), None
    for step in range(SHRINKS + 1):
        grid = number_format.compute_qparams(grouped, clip_ratio=1 - step / 100, tensor_amax=whole)
        error = number_format.dequantize_groups(number_format.quantize_groups(grouped, grid), grid) - grouped
        size = error.abs().pow(POWER).sum(-1, keepdim=True)
        if grid.scale.shape != size.shape:  # one scale for the tensor
            size = size.sum().expand_as(grid.scale)
        if least is None:
            best, least = grid, size
            continue
        better = size < least
        least = torch.where(better, size, least)
        best = QuantParams(
            **{
                name: new if name == "tensor" else torch.where(better, new, getattr(best, name))
                for name, new in grid.tensors().items()
            }
        )
    return best
