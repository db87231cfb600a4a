"""Reference semantics of GELU, softmax and LayerNorm by shifts (I-ViT): ShiftGELU, Shiftmax and I-LayerNorm.

Constant factors are sums of powers of two: log2(e) is 1 + 1/2 - 1/16 and 1.702 is 1 + 1/2 + 1/8 + 1/16. `>>` is
arithmetic: it rounds toward minus infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.runtime.integer.table_ops import floor_log2

SQRT_ITERATIONS = 10  # a fixed number, so that the latency is constant


def gelu_shift(x: Tensor, *, sigmoid_bits: int, **exp_constants: int) -> Tensor:
    """ShiftGELU: `x * sigmoid(1.702 * x)`, with a sigmoid in units of `2**-sigmoid_bits`, rounded down.

    The sigmoid of p is `1 / (1 + exp(-|p|))`, or `exp(-|p|) / (1 + exp(-|p|))` where p is negative. The paper subtracts
    the largest p of the row from both exponents instead; it cancels, and here no value depends on the others.
    """
    x = x.to(torch.int64)
    scaled = x + (x >> 1) + (x >> 3) + (x >> 4)
    exp = shift_exp(-scaled.abs(), **exp_constants)
    one = shift_exp(torch.zeros_like(x), **exp_constants)
    sigmoid = (torch.where(scaled < 0, exp, one) << sigmoid_bits) // (one + exp)
    return x * sigmoid


def softmax_shift(
    x: Tensor, mask: Tensor | None = None, *, levels: int, reciprocal_bits: int, **exp_constants: int
) -> Tensor:
    """Shiftmax over the last axis, in units of `1 / levels`, rounded half up; `mask` is as in `softmax`.

    The sum is inverted once per row: `factor = floor((levels << reciprocal_bits) / sum)`.
    """
    x = x.to(torch.int64)
    visible = torch.ones_like(x, dtype=torch.bool) if mask is None else (mask != 0).expand_as(x)
    peak = x.masked_fill(~visible, torch.iinfo(torch.int32).min).amax(-1, keepdim=True)
    exp = shift_exp((x - peak).clamp(max=0), **exp_constants).masked_fill(~visible, 0)
    factor = (levels << reciprocal_bits) // exp.sum(-1, keepdim=True).clamp(min=1)
    return (exp * factor + (1 << (reciprocal_bits - 1))) >> reciprocal_bits


def layer_norm_shift(
    x: Tensor, *, weight: Tensor, bias: Tensor, epsilon: int, shift: int, reciprocal_bits: int, output_bits: int
) -> Tensor:
    """I-LayerNorm over the last axis: as `layer_norm`, with `shift_sqrt` in the place of `sqrt`."""
    x = x.to(torch.int64)
    length = x.shape[-1]
    centered = x - (2 * x.sum(-1, keepdim=True) + length) // (2 * length)
    root = shift_sqrt(((centered >> shift) ** 2).sum(-1, keepdim=True) + epsilon) << shift
    factor = (1 << reciprocal_bits) // root.clamp(min=1)
    excess = reciprocal_bits - output_bits
    normalized = (centered * factor + (1 << (excess - 1))) >> excess
    return normalized * weight.to(torch.int64) + bias.to(torch.int64)


def shift_exp(x: Tensor, *, q_one: int, max_halvings: int, lift: int, drop: int) -> Tensor:
    """ShiftExp of x <= 0: `2**p` with `p = x + (x >> 1) - (x >> 4)`, which is `1 + f / 2` for the fraction f of p in
    (-1, 0], then one right shift per whole halving.

    `q_one` is 1 in units of x. The result is lifted or drops bits so that exp(0) has the width the conversion chose.
    """
    x = (x + (x >> 1) - (x >> 4)).clamp(min=-max_halvings * q_one)
    halvings = -x // q_one
    rest = x + halvings * q_one
    return (((rest >> 1) + q_one) << lift) >> (drop + halvings)


def shift_sqrt(x: Tensor) -> Tensor:
    """Return floor(sqrt(x)), or one more, of values from 0 to 2**62: a fixed number of Newton's iterations from
    `2**floor(bits / 2)`, where x has that many bits."""
    positive = x.to(torch.int64).clamp(min=1)
    root = 1 << ((floor_log2(positive) + 1) >> 1)
    for _ in range(SQRT_ITERATIONS):
        root = (root + positive // root) >> 1
    return torch.where(x > 0, root, 0)
