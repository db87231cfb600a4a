"""Round-to-nearest, and the range search per group (from the code of the GPTQ authors, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.numerics.format import Format, QuantizedTensor, QuantParams

RANGE_STEPS = 80  # steps of the range search, from a clip ratio of 1 down to 0.2
ERROR_POWER = 2.4  # of the error that the range search minimizes


def round_to_nearest(weight: Tensor, number_format: Format, search: bool = False) -> QuantizedTensor:
    """Quantize a matrix [out, in] to the nearest grid values; `search` also chooses each group's range."""
    if not search:
        return number_format.quantize(weight.detach())
    grouped = number_format.split_groups(weight.detach())
    qparams = search_qparams(grouped, number_format, number_format.tensor_amax(weight))
    codes = number_format.quantize_groups(grouped, qparams).flatten(-2)[..., : weight.shape[1]]
    return QuantizedTensor(number_format, codes, qparams)


def search_qparams(grouped: Tensor, number_format: Format, tensor_amax: Tensor | None = None) -> QuantParams:
    """Return the qparams with the clip ratio of least |error|^2.4 for each group [..., groups, group_size]."""
    best, best_error = number_format.compute_qparams(grouped, tensor_amax=tensor_amax), None
    for step in range(RANGE_STEPS + 1):
        qparams = number_format.compute_qparams(grouped, clip_ratio=1 - step / 100, tensor_amax=tensor_amax)
        error = number_format.dequantize_groups(number_format.quantize_groups(grouped, qparams), qparams) - grouped
        group_error = error.abs().pow(ERROR_POWER).sum(-1, keepdim=True)
        if qparams.scale.shape != group_error.shape:  # one scale for the tensor
            group_error = group_error.sum().expand_as(qparams.scale)
        if best_error is None:
            best, best_error = qparams, group_error
            continue
        better = group_error < best_error
        best_error = torch.where(better, group_error, best_error)
        best = QuantParams(
            **{
                name: new if name == "tensor" else torch.where(better, new, getattr(best, name))
                for name, new in qparams.tensors().items()
            }
        )
    return best
