"""A link of known speed between real workers: every collective sleeps before it runs, as long as the line says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as distributed
from torch import Tensor

import smelt.train.gradients.comm

ALPHA = 0.001  # seconds
BANDWIDTH = 20e6  # bytes a second that arrive at a worker


def slow_down() -> None:
    """For the rest of this process."""
    others = distributed.get_world_size() - 1
    shares = {"all_reduce": 2 * others / (others + 1), "broadcast": 1.0, "all_to_all_single": others / (others + 1)}
    for name, share in shares.items():
        setattr(distributed, name, _slow(getattr(distributed, name), share))
    gather: Any = smelt.train.gradients.comm
    gather._all_gather = _slow(gather._all_gather, others / (others + 1))  # of what it is gathered in


def _slow(work: Callable[..., Any], share: float) -> Callable[..., Any]:
    def slowed(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        time.sleep(ALPHA + share * tensor.numel() * tensor.element_size() / BANDWIDTH)
        return work(tensor, *arguments, **options)

    return slowed
