"""What travels beside every selection: whether the gradients are finite, and which tensors had any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.train.gradients import bits
from smelt.train.gradients.layout import Layout

_FLAG = 4  # bytes


@dataclass(frozen=True)
class Marks:
    """Of one worker."""

    finite: Callable[[], Tensor]  # [] bool; asked for when it is sent
    used: Tensor | None  # [pieces] bool; None: all are

    def encode(self, device: torch.device) -> Tensor:
        flag = self.finite().to(device, torch.int32).view(1).view(torch.uint8)
        return flag if self.used is None else torch.cat([flag, bits.pack(self.used.to(device))])

    @property
    def size(self) -> int:
        """Bytes."""
        return _FLAG + (0 if self.used is None else bits.size_of(len(self.used)))

    def all_finite(self, gathered: Tensor) -> Tensor:
        """[workers, bytes] -> [] bool"""
        return (gathered[:, :_FLAG].clone(memory_format=torch.contiguous_format).view(torch.int32) > 0).all()

    def allowed(self, gathered: Tensor, layout: Layout) -> Tensor | None:
        """[workers, bytes] -> [elements + 1] bool: where somebody has a gradient; None: everywhere.

        DDP drops the result for a parameter that no worker used, so nothing may leave the memory for it.
        """
        if self.used is None:
            return None
        used = torch.stack([bits.unpack(row[_FLAG:], len(self.used)) for row in gathered]).any(dim=0)  # [pieces]
        sizes = torch.tensor([piece.size for piece in layout.pieces], device=gathered.device)
        everywhere = torch.repeat_interleave(used, sizes, output_size=layout.size)
        return torch.cat([everywhere, everywhere.new_zeros(1)])


class Late:
    """Numbers that a device computes now and the host reads in the next step, without waiting for this one."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers
