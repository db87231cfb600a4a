"""Workers whose collectives are timed one by one: what link measurements and rehearsals are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from smelt.train.gradients.comm import Workers

COLLECTIVES = ("all-reduce", "all-gather", "broadcast", "all-to-all")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective, as this worker saw it."""

    collective: str
    bytes: int  # that arrive at a worker; of a broadcast those of the message, at its source too
    seconds: float  # with the time this worker waited for the others


class TimedComm(Workers):
    """Keeps a list of its calls."""

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

    def _timed(self, collective: str, tensor: Tensor, work: Callable[[], Tensor]) -> Tensor:
        if self.size == 1 or not tensor.numel():
            return work()
        before, start = self.arrived.total(), synchronized_time(tensor.device)
        result = work()
        seconds = synchronized_time(tensor.device) - start
        own = tensor.numel() * tensor.element_size()
        size = own if collective == "broadcast" else self.arrived.total() - before
        self.calls.append(CollectiveCall(collective, size, seconds))
        return result


def synchronized_time(device: torch.device) -> float:
    """Seconds, once the device has done all that it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def max_over_ranks(seconds: list[float], workers: Workers, device: torch.device) -> list[float]:
    """Of each number the largest of all workers, so that all go on with the same."""
    own = torch.tensor(seconds, dtype=torch.float64, device=device)
    largest: list[float] = workers.gather(own, "agreement").amax(dim=0).tolist()
    return largest
