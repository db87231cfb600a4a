"""Collectives that are timed one by one, for measuring links and for dry runs of compressors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from smelt.train.gradients.comm import Workers
from smelt.train.timing import synchronized_time

COLLECTIVES = ("all-reduce", "all-gather", "broadcast", "all-to-all")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as this rank saw it."""

    collective: str
    bytes: int  # that arrive at a rank; for a broadcast those of the message, at its source too
    seconds: float  # including the time this rank waited for others


class TimedComm(Workers):
    """Keeps a list of its collective calls."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.calls: list[CollectiveCall] = []

    def gather(self, tensor: Tensor, purpose: str) -> Tensor:
        return self._timed("all-gather", tensor, partial(super().gather, tensor, purpose))

    def sum(self, tensor: Tensor, purpose: str) -> Tensor:
        return self._timed("all-reduce", tensor, partial(super().sum, tensor, purpose))

    def broadcast(self, tensor: Tensor, source: int, purpose: str) -> Tensor:
        return self._timed("broadcast", tensor, partial(super().broadcast, tensor, source, purpose))

    def exchange(self, rows: Tensor, purpose: str) -> Tensor:
        return self._timed("all-to-all", rows, partial(super().exchange, rows, purpose))

    def _timed(self, collective: str, tensor: Tensor, call: Callable[[], Tensor]) -> Tensor:
        if self.size == 1 or not tensor.numel():
            return call()
        before, start = self.arrived.total(), synchronized_time(tensor.device)
        result = call()
        seconds = synchronized_time(tensor.device) - start
        message_bytes = tensor.numel() * tensor.element_size()
        size = message_bytes if collective == "broadcast" else self.arrived.total() - before
        self.calls.append(CollectiveCall(collective, size, seconds))
        return result


def max_over_ranks(values: list[float], workers: Workers, device: torch.device) -> list[float]:
    """Return the largest of all ranks for each value, so that all continue with the same."""
    local = torch.tensor(values, dtype=torch.float64, device=device)
    largest: list[float] = workers.gather(local, "agreement").amax(dim=0).tolist()
    return largest
