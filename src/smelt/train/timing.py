"""Time on CPU and GPU: synchronized readings, timestamps in a CUDA stream, and seconds per phase of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

PHASES = ("data", "forward", "backward", "reduce", "optimizer")
Timestamp = float | torch.cuda.Event


def synchronized_time(device: torch.device) -> float:
    """Return seconds of a monotonic clock after all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


class DeviceClock:
    """Take timestamps without waiting for the device: CUDA events on a GPU, the wall clock on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start = self.now()

    def now(self) -> Timestamp:
        """Mark this point of the current stream."""
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, timestamp: Timestamp) -> float:
        """Return the seconds from the clock's creation to a timestamp; waits until the device has reached it."""
        if not isinstance(timestamp, float):
            timestamp.synchronize()
        return elapsed_seconds(self._start, timestamp)


def elapsed_seconds(start: Timestamp, end: Timestamp) -> float:
    """Return the seconds between two timestamps of one device, both of which it has reached."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return float(start.elapsed_time(end)) / 1000


class PhaseTimer:
    """Add up the seconds of each phase of a step; `reduce` runs inside `backward` and is subtracted from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = DeviceClock(device)
        self._spans: list[tuple[str, Timestamp, Timestamp]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the context; none while a CUDA graph is captured, as nothing runs then."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield
            return
        start = self._clock.now()
        try:
            yield
        finally:
            self._spans.append((name, start, self._clock.now()))

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        seconds = dict.fromkeys(PHASES, 0.0)
        for name, start, end in self._spans:
            seconds[name] += elapsed_seconds(start, end)
        self._spans.clear()
        seconds["backward"] = max(seconds["backward"] - seconds["reduce"], 0.0)
        return seconds
