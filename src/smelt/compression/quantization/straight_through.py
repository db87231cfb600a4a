"""Rounding that lets gradients through: straight for what is rounded, and through the scale of the grid.

The error of rounding counts as a constant share of the scale, and what lies outside of the grid as a constant times the
scale, which is a function of the values themselves; the gradient of learned step sizes (Esser et al., 2020).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smelt.numerics.format import Format, QuantParams


def rounded(x: Tensor, number_format: Format, clip: float = 1.0) -> Tensor:  # [..., columns] -> [..., columns]
    """The values that a tensor written in a format is read back as, in the dtype of x. The grid is taken from x itself
    and covers `clip` of its range; the gradient is one inside it and zero outside, apart from that of the scale."""
    grouped = number_format.split_groups(x)
    grid = number_format.compute_qparams(grouped, clip_ratio=clip, tensor_amax=number_format.tensor_amax(x.detach()))
    with torch.no_grad():
        fixed = QuantParams(**{name: tensor.detach() for name, tensor in grid.tensors().items()})
        values, low, high = (
            number_format.dequantize_groups(number_format.quantize_groups(each, fixed), fixed)
            for each in (grouped, grouped.new_full((1,), -math.inf), grouped.new_full((1,), math.inf))
        )
        error, inside = values - grouped, (grouped >= low) & (grouped <= high)
    ratio = grid.scale / fixed.scale  # one, with the gradient of the scale
    if grid.negative is not None and fixed.negative is not None:
        ratio = torch.where(grouped > 0, ratio, grid.negative / fixed.negative)
    result = torch.where(inside, grouped + error * ratio, values * ratio)
    return result.flatten(-2)[..., : x.shape[-1]].to(x.dtype)
