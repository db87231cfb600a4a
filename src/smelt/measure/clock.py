"""Time calls: warmup, then one measurement per call, with the right clock for the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

Stopwatch = Callable[[Callable[[], object]], float]


def _seconds_on_cpu(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _seconds_on_cuda(function: Callable[[], object]) -> float:
    # The device is idle at the first event, so the measured time includes the kernel launches, as users see it.
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000.0


def stopwatch(device: torch.device | str) -> Stopwatch:
    """Return the clock of a device: it calls a function once and returns the seconds."""
    return _seconds_on_cuda if torch.device(device).type == "cuda" else _seconds_on_cpu


def time_call(
    function: Callable[[], object],
    *,
    warmup: int = 3,
    repeats: int = 20,
    min_seconds: float = 0.0,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Return the seconds of each timed call: at least `repeats` calls, and more until they sum to `min_seconds`."""
    if warmup < 0 or repeats < 1:
        raise ValueError(f"warmup must be 0 or more and repeats 1 or more, not {warmup} and {repeats}")
    clock = stopwatch(device)
    for _ in range(warmup):
        clock(function)
    readings: list[float] = []
    total = 0.0
    while len(readings) < repeats or total < min_seconds:
        readings.append(clock(function))
        total += readings[-1]
    return np.array(readings)
