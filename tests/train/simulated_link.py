"""Simulate a link of known speed on a clock that other processes cannot disturb.

The clock adds the CPU time of this process and the modeled time of its collectives. On the wall clock, a busy machine
would look like a slow link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as distributed
from torch import Tensor

import smelt.train.gradients.autotune.auto
import smelt.train.gradients.comm
import smelt.train.timing

ALPHA = 0.001  # seconds
BANDWIDTH = 20e6  # received bytes per second and rank
_simulated_seconds = 0.0


def simulate_link(alpha: float = ALPHA, bandwidth: float = BANDWIDTH) -> None:
    """Let every collective take its modeled time, for the rest of this process."""
    modules: tuple[Any, ...] = (smelt.train.timing, smelt.train.gradients.autotune.auto)
    for module in modules:
        module.perf_counter = _clock
    others = distributed.get_world_size() - 1
    shares = {"all_reduce": 2 * others / (others + 1), "broadcast": 1.0, "all_to_all_single": others / (others + 1)}
    for name, share in shares.items():
        setattr(distributed, name, _timed(getattr(distributed, name), alpha, share / bandwidth))
    gather: Any = smelt.train.gradients.comm  # whose bytes are counted from the output buffer
    gather._all_gather = _timed(gather._all_gather, alpha, others / (others + 1) / bandwidth)


def _clock() -> float:
    return time.process_time() + _simulated_seconds


def _timed(work: Callable[..., Any], alpha: float, beta: float) -> Callable[..., Any]:
    def timed(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        global _simulated_seconds
        _simulated_seconds += alpha + beta * tensor.numel() * tensor.element_size()
        return work(tensor, *arguments, **options)

    return timed
