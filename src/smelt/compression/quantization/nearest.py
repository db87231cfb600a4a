"""Rounding to the nearest value of a grid, and the search for a grid's range (of the GPTQ authors' code, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.numerics.format import Format, Grid, Quantized

SHRINKS = 80  # steps of the range search, from 1 down to 0.2
POWER = 2.4  # of the error it minimises


def nearest(weight: Tensor, number_format: Format, search: bool = False) -> Quantized:
    """A matrix on its own grid."""
    if not search:
        return number_format.quantize(weight.detach())
    grouped = number_format.groups(weight.detach())
    grid = searched_grid(grouped, number_format, number_format.whole(weight))
    codes = number_format.encode(grouped, grid).flatten(-2)[..., : weight.shape[1]]
    return Quantized(number_format, codes, grid)


def searched_grid(grouped: Tensor, number_format: Format, whole: Tensor | None = None) -> Grid:
    """Of grids with a narrowed range, the one of least |error|^2.4 for each group [..., groups, size]."""
    best, least = number_format.fit(grouped, whole=whole), None
    for step in range(SHRINKS + 1):
        grid = number_format.fit(grouped, shrink=1 - step / 100, whole=whole)
        error = number_format.decode(number_format.encode(grouped, grid), grid) - grouped
        size = error.abs().pow(POWER).sum(-1, keepdim=True)
        if grid.scale.shape != size.shape:  # one scale for the tensor
            size = size.sum().expand_as(grid.scale)
        if least is None:
            best, least = grid, size
            continue
        better = size < least
        least = torch.where(better, size, least)
        best = Grid(
            **{
                name: new if name == "tensor" else torch.where(better, new, getattr(best, name))
                for name, new in grid.tensors().items()
            }
        )
    return best
