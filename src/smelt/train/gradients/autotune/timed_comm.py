"""Collectives that are timed one by one, for measuring links and for dry runs of compressors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from smelt.train.gradients.comm import Comm
from smelt.train.timing import synchronized_time

COLLECTIVES = ("all-reduce", "all-gather", "broadcast", "all-to-all")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as this rank saw it."""

    collective: str
    bytes: int  # that arrive at a rank; for a broadcast those of the message, at its source too
    seconds: float  # including the time this rank waited for others


class TimedComm(Comm):
    """Keeps a list of its collective calls."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.calls: list[CollectiveCall] = []

    def all_gather(self, tensor: Tensor, purpose: str) -> Tensor:
        return self._timed("all-gather", tensor, partial(super().all_gather, tensor, purpose))

    def all_reduce(self, tensor: Tensor, purpose: str) -> Tensor:
        return self._timed("all-reduce", tensor, partial(super().all_reduce, tensor, purpose))

    def broadcast(self, tensor: Tensor, source: int, purpose: str) -> Tensor:
        return self._timed("broadcast", tensor, partial(super().broadcast, tensor, source, purpose))

    def all_to_all(self, rows: Tensor, purpose: str) -> Tensor:
        return self._timed("all-to-all", rows, partial(super().all_to_all, rows, purpose))

    def _timed(self, collective: str, tensor: Tensor, call: Callable[[], Tensor]) -> Tensor:
        if self.world_size == 1 or not tensor.numel():
            return call()
        before, start = self.bytes_received.total(), synchronized_time(tensor.device)
        result = call()
        seconds = synchronized_time(tensor.device) - start
        message_bytes = tensor.numel() * tensor.element_size()
        size = message_bytes if collective == "broadcast" else self.bytes_received.total() - before
        self.calls.append(CollectiveCall(collective, size, seconds))
        return result


class FakeComm(TimedComm):
    """Send nothing: every other rank is taken to have sent what this one did.

    Results have the right shape and the wrong values. For dry runs of what sends as much whatever the others do, such
    as a dense bucket, which takes seconds on a slow link.
    """

    def _run_all_gather(self, gathered: Tensor, own: Tensor) -> None:
        gathered.view(self.world_size, -1).copy_(own)

    def _run_all_reduce(self, tensor: Tensor) -> None:
        tensor.mul_(self.world_size)

    def _run_all_to_all(self, received: Tensor, rows: Tensor) -> None:
        received.view(self.world_size, -1).copy_(rows.view(self.world_size, -1)[self.rank])


def max_over_ranks(values: list[float], comm: Comm, device: torch.device) -> list[float]:
    """Return the largest of all ranks for each value, so that all continue with the same."""
    local = torch.tensor(values, dtype=torch.float64, device=device)
    largest: list[float] = comm.all_gather(local, "agreement").amax(dim=0).tolist()
    return largest
