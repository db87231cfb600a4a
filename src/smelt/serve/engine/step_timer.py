"""Time the steps of an engine, and derive how long the current one may take from those before it.

The limit lets a watchdog tell a step that hangs in native code from a long one. The work of a step is counted in
tokens, each weighted by its context. A step may take `ALLOWANCE` seconds plus `SLACK` times the longest step of its
size so far; sizes are powers of two of the work. The time of a size that has not run yet is bounded by that of a
smaller one, scaled with the work (larger batches are never slower per token), and by that of a larger one. Where
kernels are compiled on first use, the first step of a size has no limit of its own.
"""

from __future__ import annotations

import math
import time

ALLOWANCE = 8.0  # seconds
SLACK = 4.0  # for other processes on the machine and what the work does not count
FORGETTING = 0.95  # per step of the same size, so that one slow step does not raise the limit forever


class StepTimer:
    """Used by the thread that runs steps; `seconds` and `limit` may be read by any other."""

    def __init__(self, *, compiles_on_first_use: bool) -> None:
        self._compiles_on_first_use = compiles_on_first_use
        self._longest: dict[int, float] = {}  # seconds by size
        self._started: float | None = None
        self._work = 0.0

    def begin(self) -> None:
        self._work, self._started = 0.0, time.monotonic()

    def add_work(self, work: float) -> None:
        """Add to the work that the current step launches or waits for."""
        self._work += work

    def end(self) -> None:
        assert self._started is not None
        seconds = time.monotonic() - self._started
        self._started = None
        if self._work:
            size = _size(self._work)
            self._longest[size] = max(seconds, FORGETTING * self._longest.get(size, 0.0))

    @property
    def seconds(self) -> float:
        """How long the current step has run; 0 between steps."""
        started = self._started
        return 0.0 if started is None else time.monotonic() - started

    @property
    def limit(self) -> float | None:
        """How long the current step may run; None if nothing is known about it."""
        work = self._work
        if not work:  # it is still being scheduled
            return ALLOWANCE
        size, longest = _size(work), dict(self._longest)
        if self._compiles_on_first_use and size not in longest:
            return None
        bounds = [seconds * max(1.0, 2.0 ** (size + 1 - other)) for other, seconds in longest.items() if other != size]
        bounds += [longest[size]] if size in longest else []
        return ALLOWANCE + SLACK * min(bounds) if bounds else None


def _size(work: float) -> int:
    return int(math.log2(max(work, 1.0)))
