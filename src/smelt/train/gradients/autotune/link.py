"""How fast the workers talk: a line through the times of each collective that the compressors use.

The alpha-beta model: a collective takes alpha + m / B, where m are the bytes that arrive at one worker when it runs as
a ring, counted as `workers.py` counts them. Alpha is what the whole collective costs before the first byte, all its
hops together, not the latency of one hop.
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
from smelt.train.gradients.comm import Workers

_SIZES = (2**10, 2**15, 2**18, 2**20, 2**22, 2**24)  # bytes that arrive
_REPEATS = 5
_SHORT = 2**15  # bytes: up to here a repeat costs nothing and its noise the most
_MORE = 5  # times as many repeats of short messages
_LONG = 0.05  # seconds: after a size that takes longer no larger one is tried
_FEWEST = 3  # sizes that a line goes through, however long they take


@dataclass(frozen=True)
class CollectiveFit:
    """One collective: seconds = alpha + beta * bytes."""

    alpha: float  # seconds
    beta: float  # seconds for a byte that arrives
    spread: float  # half of all repeats lay within this share of their median, at the size where it was widest
    sizes: tuple[int, ...]  # bytes
    seconds: tuple[float, ...]  # median of each size, of the slowest rank

    def time(self, size: float) -> float:
        return self.alpha + self.beta * size

    @property
    def bandwidth(self) -> float:
        """Bytes a second; infinite where more bytes took no longer."""
        return 1 / self.beta if self.beta else float("inf")


@dataclass(frozen=True)
class Link:
    """What was measured between the workers of a group; the same on each of them."""

    workers: int
    backend: str
    collectives: dict[str, CollectiveFit]  # by collective

    def time(self, collective: str, size: float) -> float:
        """Seconds until so many bytes have arrived."""
        return self.collectives[collective].time(size)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_link(workers: Workers, device: torch.device | str = "cpu", repeats: int = _REPEATS) -> Link:
    """Time every collective at several sizes; all workers of the group must call it."""
    if workers.size == 1:
        raise ConfigError("one worker alone has no link to measure; start several with torchrun.")
    device = torch.device(device)
    timed = TimedComm(workers.group)
    fits = {name: _line(name, timed, device, repeats) for name in COLLECTIVES}
    return Link(workers.size, str(distributed.get_backend(workers.group)), fits)


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Alpha and beta with the least squared relative error, neither below zero.

    Relative, since the smallest messages tell alpha and would not count beside an absolute error of the largest.
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


def _line(collective: str, workers: TimedComm, device: torch.device, repeats: int) -> CollectiveFit:
    sizes: list[int] = []
    medians: list[float] = []
    spreads: list[float] = []
    for size in _SIZES:
        arrived, seconds = _times(collective, size, workers, device, repeats * (_MORE if size <= _SHORT else 1))
        first, middle, third = quantiles(seconds, n=4)
        sizes.append(arrived)
        medians.append(median(seconds))
        spreads.append((third - first) / 2 / middle)
        if middle > _LONG and len(sizes) >= _FEWEST:
            break
    alpha, beta = fit(sizes, medians)
    return CollectiveFit(alpha, beta, max(spreads), tuple(sizes), tuple(medians))


def _times(
    collective: str, size: int, workers: TimedComm, device: torch.device, repeats: int
) -> tuple[int, list[float]]:
    """Bytes that arrive, and of each repeat the seconds of the slowest rank."""
    work = _work(collective, size, workers, device)
    own = []
    for _ in range(repeats + 1):  # the first opens connections and is not counted
        workers.gather(torch.zeros(1, device=device), "agreement")  # all start together
        work()
        own.append(workers.calls[-1])
    return own[-1].bytes, max_over_ranks([call.seconds for call in own[1:]], workers, device)


def _work(collective: str, size: int, workers: TimedComm, device: torch.device) -> Callable[[], Tensor]:
    """A call of the collective that brings about so many bytes to a worker."""
    others = workers.size - 1
    message = {
        "all-reduce": size * workers.size // (2 * others),
        "all-gather": size // others,
        "broadcast": size,
        "all-to-all": size * workers.size // others,
    }[collective]
    values = torch.zeros(max(message // 4 // workers.size, 1), workers.size, device=device).T.contiguous()
    calls: dict[str, Callable[[], Tensor]] = {
        "all-reduce": lambda: workers.sum(values, "link"),
        "all-gather": lambda: workers.gather(values, "link"),
        "broadcast": lambda: workers.broadcast(values, 0, "link"),
        "all-to-all": lambda: workers.exchange(values, "link"),
    }
    return calls[collective]
