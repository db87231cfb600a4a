"""Several ranks in one run: rank 0 leads it, and the others take part in the steps that train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as distributed

_END = -1


class Ranks:
    """Tells which step the ranks take part in; with a single rank there is nobody to tell."""

    def __init__(self) -> None:
        several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        # A group of its own: between two steps that train, rank 0 may work for longer than a collective may take.
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(days=30)) if several else None

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Let the other ranks end with the block, however it ends; of rank 0."""
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def sharing(self, position: int) -> Iterator[None]:
        """Let the other ranks take part in a step; of rank 0."""
        self._broadcast(position)
        try:
            yield
        except BaseException:
            self._group = None  # they are inside the step, which fails there too, and do not listen
            raise

    def end(self) -> None:
        """Let the other ranks end; of rank 0."""
        self._broadcast(_END)
        self._group = None

    def next_step(self) -> int | None:
        """Wait for the position of the next step to take part in; None: the run needs this rank no more."""
        position = self._broadcast(_END)
        return None if position == _END else position

    def _broadcast(self, value: int) -> int:
        """Return the value of rank 0."""
        if self._group is None:
            return value
        tensor = torch.tensor([value])
        distributed.broadcast(tensor, 0, group=self._group)
        return int(tensor)
