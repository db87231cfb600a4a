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
    """The share of values other than zero that were rounded to zero, and their share of the squared error."""
    held = x != 0
    lost = held & (rounded == 0)
    error = (x.double() - rounded.double()).square()
    total, count = float(error.sum()), int(held.sum())
    return int(lost.sum()) / max(count, 1), float(error[lost].sum()) / total if total else 0.0
