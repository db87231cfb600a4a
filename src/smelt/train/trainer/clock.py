"""Seconds by phase of a step. On a GPU between events of its stream, so that no phase waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

PHASES = ("data", "forward", "backward", "reduce", "optimizer")
_Mark = float | torch.cuda.Event


class PhaseTimer:
    """Adds up phases of one step after the other; `reduce` lies inside `backward` and is taken out of it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, _Mark, _Mark]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self._mark()
        try:
            yield
        finally:
            self._spans.append((name, begin, self._mark()))

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        spent = dict.fromkeys(PHASES, 0.0)
        for name, begin, end in self._spans:
            spent[name] += _between(begin, end)
        self._spans.clear()
        spent["backward"] = max(spent["backward"] - spent["reduce"], 0.0)
        return spent

    def _mark(self) -> _Mark:
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    return float(begin.elapsed_time(end)) / 1000
