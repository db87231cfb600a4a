"""Eight bits in a byte."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def pack(bits: Tensor) -> Tensor:
    """[count] bool -> [ceil(count / 8)] uint8, the first bit lowest."""
    rows = functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (rows << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1, dtype=torch.uint8)


def unpack(data: Tensor, count: int) -> Tensor:
    """[bytes] uint8 -> [count] bool"""
    return (data[:, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).bool().flatten()[:count]


def size_of(count: int) -> int:
    """Bytes of so many bits."""
    return -(-count // 8)
