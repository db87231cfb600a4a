"""Quantization error metrics."""

from __future__ import annotations

import torch
from torch import Tensor


def signal_to_noise(x: Tensor, rounded: Tensor) -> float:
    """Return the signal-to-noise ratio in dB."""
    x, rounded = x.double(), rounded.double()
    noise = (x - rounded).square().sum()
    return float(10 * torch.log10(x.square().sum() / noise))


def underflow_share(x: Tensor, rounded: Tensor) -> tuple[float, float]:
    """Return the share of nonzero values that were rounded to zero, and their share of the squared error."""
    nonzero = x != 0
    underflowed = nonzero & (rounded == 0)
    error = (x.double() - rounded.double()).square()
    total, count = float(error.sum()), int(nonzero.sum())
    return int(underflowed.sum()) / max(count, 1), float(error[underflowed].sum()) / total if total else 0.0
