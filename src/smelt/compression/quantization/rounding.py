"""Round-to-nearest, and the range search per group (from the code of the GPTQ authors, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.numerics.format import Format, QuantizedTensor, QuantParams

SHRINKS = 80  # steps of the range search, from a clip ratio of 1 down to 0.2
POWER = 2.4  # of the error that the range search minimizes


def round_to_nearest(weight: Tensor, number_format: Format, search: bool = False) -> QuantizedTensor:
    """Quantize a matrix [out, in] to the nearest grid values; `search` also chooses each group's range."""
    if not search:
        return number_format.quantize(weight.detach())
    grouped = number_format.split_groups(weight.detach())
    grid = search_qparams(grouped, number_format, number_format.tensor_amax(weight))
    codes = number_format.quantize_groups(grouped, grid).flatten(-2)[..., : weight.shape[1]]
    return QuantizedTensor(number_format, codes, grid)


def search_qparams(grouped: Tensor, number_format: Format, whole: Tensor | None = None) -> QuantParams:
    """Return the qparams with the clip ratio of least |error|^2.4 for each group [..., groups, group_size]."""
    best, best_error = number_format.compute_qparams(grouped, tensor_amax=whole), None
    for step in range(SHRINKS + 1):
        grid = number_format.compute_qparams(grouped, clip_ratio=1 - step / 100, tensor_amax=whole)
        error = number_format.dequantize_groups(number_format.quantize_groups(grouped, grid), grid) - grouped
        group_error = error.abs().pow(POWER).sum(-1, keepdim=True)
        if grid.scale.shape != group_error.shape:  # one scale for the tensor
            group_error = group_error.sum().expand_as(grid.scale)
        if best_error is None:
            best, best_error = grid, group_error
            continue
        better = group_error < best_error
        best_error = torch.where(better, group_error, best_error)
        best = QuantParams(
            **{
                name: new if name == "tensor" else torch.where(better, new, getattr(best, name))
                for name, new in grid.tensors().items()
            }
        )
    return best
