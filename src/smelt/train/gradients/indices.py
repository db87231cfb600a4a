"""How chosen indices travel: int32, or 16 bits inside blocks of 65,536 elements with a count for every block.

Blocks are the smaller form as soon as a worker sends more than two indices for each block of the vector; which of the
two is used follows from the target count alone, so that all workers decide alike.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 1 << 16


def blocks_of(elements: int, expected: float) -> int:
    """How many block counts travel with `expected` indices of a worker; 0: plain int32 is smaller."""
    blocks = -(-elements // BLOCK)
    return blocks if 4 * expected > 2 * expected + 4 * blocks else 0


def block_counts(indices: Tensor, blocks: int) -> Tensor:
    """How many of the ascending indices lie in each block, [blocks] int64."""
    return torch.bincount(indices // BLOCK, minlength=blocks)[:blocks]


def encode(indices: Tensor, slots: int, blocks: int) -> Tensor:
    """[count] int64, ascending -> bytes [slots * width(blocks)], padded with zeros."""
    padded = functional.pad(indices, (0, slots - len(indices)))
    if not blocks:
        return padded.to(torch.int32).view(torch.uint8)
    return (padded % BLOCK - BLOCK // 2).to(torch.int16).view(torch.uint8)


def decode(data: Tensor, count: int, counts: Tensor) -> Tensor:
    """The indices that `encode` wrote, [count] int64. counts: of each block, or empty."""
    if not len(counts):
        return data.view(torch.int32)[:count].long()
    inside = data.view(torch.int16)[:count].long() + BLOCK // 2
    starts = torch.arange(len(counts), device=data.device) * BLOCK
    return torch.repeat_interleave(starts, counts.to(data.device)) + inside


def width(blocks: int) -> int:
    """Bytes of one index."""
    return 2 if blocks else 4
