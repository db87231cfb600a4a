"""Measure the link between ranks: an alpha-beta model of each collective that the compressors use.

A collective takes alpha + m / B seconds, where m is the bytes that arrive at one rank when it runs as a ring, as
`comm.py` counts them. Alpha is the cost of the whole collective before the first byte, all its hops together, not the
latency of one hop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.timed_comm import COLLECTIVES, TimedComm, max_over_ranks
from smelt.train.gradients.comm import Comm

_SIZES = (2**10, 2**15, 2**18, 2**20, 2**22, 2**24)  # bytes that arrive
_REPEATS = 5
_SHORT_BYTES = 2**15  # up to here a repeat costs nothing and the noise is largest
_SHORT_FACTOR = 5  # times as many repeats of short messages
_SLOW_SECONDS = 0.05  # after a size that takes longer no larger one is measured
_MIN_SIZES = 3  # measured however long they take


@dataclass(frozen=True)
class AlphaBeta:
    """The cost of a collective: seconds = alpha + beta * bytes that arrive at a rank."""

    alpha: float  # seconds
    beta: float  # seconds per byte

    def time(self, size: float) -> float:
        """Predict the seconds until `size` bytes have arrived."""
        return self.alpha + self.beta * size

    @property
    def bandwidth(self) -> float:
        """Bytes per second; infinite where more bytes took no longer."""
        return 1 / self.beta if self.beta else float("inf")


@dataclass(frozen=True)
class CollectiveFit(AlphaBeta):
    """The measured cost of one collective."""

    spread: float  # half of all repeats lie within this fraction of their median, at the size where it is widest
    sizes: tuple[int, ...]  # bytes
    seconds: tuple[float, ...]  # median of each size, of the slowest rank


@dataclass(frozen=True)
class Link:
    """The measured link of a process group; the same on each rank."""

    world_size: int
    backend: str
    collectives: dict[str, CollectiveFit]

    def time(self, collective: str, size: float) -> float:
        """Predict the seconds until `size` bytes have arrived."""
        return self.collectives[collective].time(size)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_link(comm: Comm, device: torch.device | str = "cpu", repeats: int = _REPEATS) -> Link:
    """Time every collective at several sizes; all ranks of the group must call it together."""
    if comm.world_size == 1:
        raise ConfigError("a single rank has no link to measure; start several with torchrun.")
    device = torch.device(device)
    timed = TimedComm(comm.group)
    fits = {name: _fit_collective(name, timed, device, repeats) for name in COLLECTIVES}
    return Link(comm.world_size, str(distributed.get_backend(comm.group)), fits)


def fit_alpha_beta(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Fit alpha and beta, neither below zero, by least squares of the relative error.

    Relative, since the smallest messages determine alpha and would not count beside the absolute error of the largest.
    """
    weights = [1 / time**2 for time in seconds]
    rows = list(zip(weights, sizes, seconds, strict=True))
    one = sum(weights)
    x, t = sum(w * size for w, size, _ in rows), sum(w * time for w, _, time in rows)
    xx, xt = sum(w * size * size for w, size, _ in rows), sum(w * size * time for w, size, time in rows)
    beta = (one * xt - x * t) / (one * xx - x * x)
    alpha = (t - beta * x) / one
    if beta < 0:
        return t / one, 0.0
    return (alpha, beta) if alpha >= 0 else (0.0, xt / xx)


def _fit_collective(collective: str, comm: TimedComm, device: torch.device, repeats: int) -> CollectiveFit:
    sizes: list[int] = []
    medians: list[float] = []
    spreads: list[float] = []
    for size in _SIZES:
        factor = _SHORT_FACTOR if size <= _SHORT_BYTES else 1
        received, seconds = _time_collective(collective, size, comm, device, repeats * factor)
        first, middle, third = quantiles(seconds, n=4)
        sizes.append(received)
        medians.append(median(seconds))
        spreads.append((third - first) / 2 / middle)
        if middle > _SLOW_SECONDS and len(sizes) >= _MIN_SIZES:
            break
    alpha, beta = fit_alpha_beta(sizes, medians)
    return CollectiveFit(alpha, beta, max(spreads), tuple(sizes), tuple(medians))


def _time_collective(
    collective: str, size: int, comm: TimedComm, device: torch.device, repeats: int
) -> tuple[int, list[float]]:
    """Return the bytes that arrive, and the seconds of the slowest rank for each repeat."""
    call = _collective_call(collective, size, comm, device)
    timings = []
    for _ in range(repeats + 1):  # the first opens connections and is not counted
        comm.all_gather(torch.zeros(1, device=device), "agreement")  # start together
        call()
        timings.append(comm.calls[-1])
    return timings[-1].bytes, max_over_ranks([timing.seconds for timing in timings[1:]], comm, device)


def _collective_call(collective: str, size: int, comm: TimedComm, device: torch.device) -> Callable[[], Tensor]:
    """Return a call of the collective that brings about `size` bytes to each rank."""
    others = comm.world_size - 1
    message = {
        "all-reduce": size * comm.world_size // (2 * others),
        "all-gather": size // others,
        "broadcast": size,
        "all-to-all": size * comm.world_size // others,
    }[collective]
    values = torch.zeros(max(message // 4 // comm.world_size, 1), comm.world_size, device=device).T.contiguous()
    calls: dict[str, Callable[[], Tensor]] = {
        "all-reduce": lambda: comm.all_reduce(values, "link"),
        "all-gather": lambda: comm.all_gather(values, "link"),
        "broadcast": lambda: comm.broadcast(values, 0, "link"),
        "all-to-all": lambda: comm.all_to_all(values, "link"),
    }
    return calls[collective]
