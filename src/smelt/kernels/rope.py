"""Rotary position embedding (Su et al., 2021): the plain reference. `kernels.gpu.rope` and the CPU program fuse it."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [..., tokens, head_dim] by the angles of their positions."""
    return x * cos + rotate_half(x) * sin


def undo_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate back. The squared norm is 1 except for models that scale their rotation."""
    return (x * cos - rotate_half(x) * sin) / (cos.square() + sin.square())


def rotate_half(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)
