"""Simulate a link of known speed: every collective sleeps for its modeled time before it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as distributed
from torch import Tensor

import smelt.train.gradients.comm

ALPHA = 0.001  # seconds
BANDWIDTH = 20e6  # received bytes per second and rank


def slow_down() -> None:
    """Slow down collectives for the rest of this process."""
    others = distributed.get_world_size() - 1
    shares = {"all_reduce": 2 * others / (others + 1), "broadcast": 1.0, "all_to_all_single": others / (others + 1)}
    for name, share in shares.items():
        setattr(distributed, name, _slow(getattr(distributed, name), share))
    gather: Any = smelt.train.gradients.comm
    gather._all_gather = _slow(gather._all_gather, others / (others + 1))  # counted from the output buffer


def _slow(work: Callable[..., Any], share: float) -> Callable[..., Any]:
    def slowed(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        time.sleep(ALPHA + share * tensor.numel() * tensor.element_size() / BANDWIDTH)
        return work(tensor, *arguments, **options)

    return slowed
