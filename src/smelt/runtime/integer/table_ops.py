"""Reference semantics of softmax and the norms by tables (NN-LUT): exp, 1/x and 1/sqrt(x) are piecewise linear.

The argument of 1/x is shifted into [1, 2) and that of 1/sqrt(x) into [1, 4), so that a small table covers all integers.
Tables of a node are three constants: breakpoints [N - 1], slopes [N] and intercepts [N].
"""

from __future__ import annotations

import torch
from torch import Tensor

RECIPROCAL_INPUT_BITS = 15  # arguments in [1, 2) are in units of 2^-15
RSQRT_INPUT_BITS = 14  # arguments in [1, 4) are in units of 2^-14
RESULT_BITS = 29  # results of both tables are in units of 2^-29


def table(x: Tensor, *, breakpoints: Tensor, slopes: Tensor, intercepts: Tensor) -> Tensor:
    """Evaluate a piecewise linear function: `slopes[k] * x + intercepts[k]` with k the number of breakpoints <= x."""
    x = x.to(torch.int64)
    entry = torch.bucketize(x, breakpoints.to(torch.int64), right=True)
    return slopes.to(torch.int64)[entry] * x + intercepts.to(torch.int64)[entry]


def softmax_table(
    x: Tensor, mask: Tensor | None = None, *, levels: int, lowest: int, exp_bits: int, exp_shift: int,
    exp_breakpoints: Tensor, exp_slopes: Tensor, exp_intercepts: Tensor,
    reciprocal_breakpoints: Tensor, reciprocal_slopes: Tensor, reciprocal_intercepts: Tensor,
) -> Tensor:  # fmt: skip
    """Softmax over the last axis: probabilities in units of `1 / levels`, rounded half up; the mask is as in `softmax`.

    exp is looked up at `max(x - peak, lowest)`, shifted right by `exp_shift` with rounding half up, and clamped to 0 to
    `2**exp_bits`. The sum of a row is shifted into [1, 2) before 1/x is looked up.
    """
    x = x.to(torch.int64)
    visible = torch.ones_like(x, dtype=torch.bool) if mask is None else (mask != 0).expand_as(x)
    peak = x.masked_fill(~visible, torch.iinfo(torch.int32).min).amax(-1, keepdim=True)
    exp = table((x - peak).clamp(lowest, 0), breakpoints=exp_breakpoints, slopes=exp_slopes, intercepts=exp_intercepts)
    exp = ((exp + (1 << (exp_shift - 1))) >> exp_shift).clamp(0, 1 << exp_bits)
    exp = exp.masked_fill(~visible, 0)
    total = exp.sum(-1, keepdim=True).clamp(min=1)
    exponent = floor_log2(total)
    reciprocal = table(
        _shift(total, RECIPROCAL_INPUT_BITS - exponent),
        breakpoints=reciprocal_breakpoints, slopes=reciprocal_slopes, intercepts=reciprocal_intercepts,
    )  # fmt: skip
    excess = RESULT_BITS + exponent
    return ((exp * levels * reciprocal + (1 << (excess - 1))) >> excess).clamp(0, levels)


def layer_norm_table(
    x: Tensor, *, weight: Tensor, bias: Tensor, epsilon: int, shift: int, output_bits: int, breakpoints: Tensor,
    slopes: Tensor, intercepts: Tensor,
) -> Tensor:  # fmt: skip
    """LayerNorm over the last axis as `layer_norm`, with 1/sqrt(x) of the sum of squares by a table."""
    x = x.to(torch.int64)
    length = x.shape[-1]
    centered = x - (2 * x.sum(-1, keepdim=True) + length) // (2 * length)
    normalized = _normalize(centered, epsilon, shift, output_bits, breakpoints, slopes, intercepts)
    return normalized * weight.to(torch.int64) + bias.to(torch.int64)


def rms_norm_table(
    x: Tensor, *, weight: Tensor, epsilon: int, shift: int, output_bits: int, breakpoints: Tensor, slopes: Tensor,
    intercepts: Tensor,
) -> Tensor:  # fmt: skip
    """RMSNorm over the last axis: `layer_norm_table` without mean and bias."""
    normalized = _normalize(x.to(torch.int64), epsilon, shift, output_bits, breakpoints, slopes, intercepts)
    return normalized * weight.to(torch.int64)


def floor_log2(x: Tensor) -> Tensor:
    """Return the index of the highest bit of positive int64 values."""
    exponent = torch.zeros_like(x)
    for bits in (32, 16, 8, 4, 2, 1):
        large = x >= 1 << bits
        exponent = torch.where(large, exponent + bits, exponent)
        x = torch.where(large, x >> bits, x)
    return exponent


def _normalize(
    x: Tensor, epsilon: int, shift: int, output_bits: int, breakpoints: Tensor, slopes: Tensor, intercepts: Tensor
) -> Tensor:
    squares = (((x >> shift) ** 2).sum(-1, keepdim=True) + epsilon).clamp(min=1)
    exponent = floor_log2(squares) >> 1  # of the root
    rsqrt = table(
        _shift(squares, RSQRT_INPUT_BITS - 2 * exponent),
        breakpoints=breakpoints, slopes=slopes, intercepts=intercepts,
    )  # fmt: skip
    excess = RESULT_BITS + exponent + shift - output_bits
    return (x * rsqrt + (1 << (excess - 1))) >> excess


def _shift(x: Tensor, bits: Tensor) -> Tensor:
    """Shift to the left by `bits`, or to the right where they are negative."""
    return torch.where(bits >= 0, x << bits.clamp(min=0), x >> (-bits).clamp(min=0))
