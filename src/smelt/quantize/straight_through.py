"""Rounding that lets gradients through: what is rounded counts as if it were not, what is clipped as constant."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smelt.numerics.format import Format


def rounded(x: Tensor, number_format: Format, clip: float = 1.0) -> Tensor:  # [..., columns] -> [..., columns]
    """The values that a tensor written in a format is read back as, in the dtype of x. The grid is taken from x itself,
    `clip` of its range, and is a constant to the gradient, which is one inside that range and zero outside."""
    with torch.no_grad():
        grouped = number_format.groups(x)
        grid = number_format.fit(grouped, shrink=clip, whole=number_format.whole(x))
        values, low, high = (
            number_format.decode(number_format.encode(each, grid), grid)
            for each in (grouped, grouped.new_full((1,), -math.inf), grouped.new_full((1,), math.inf))
        )
        inside = ((grouped >= low) & (grouped <= high)).flatten(-2)[..., : x.shape[-1]]
        values = values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)
    return torch.where(inside, x + (values - x).detach(), values)
