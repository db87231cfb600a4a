"""How fast the workers gather and scatter: a line through the times of several sizes, as in `link.py`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.train.fsdp.facts import AlphaBeta
from smelt.train.gradients.autotune.link import fit
from smelt.train.gradients.autotune.timed_comm import max_over_ranks, synchronized_time
from smelt.train.gradients.comm import Workers

_SIZES = (2**12, 2**16, 2**18, 2**20, 2**22)  # bytes that are gathered or scattered
_REPEATS = 7


def measure_collectives(workers: Workers, device: torch.device) -> tuple[AlphaBeta, AlphaBeta]:
    """Of gathers and of scatters; all workers call it together and find the same."""
    others = workers.size - 1
    if not others:
        raise ConfigError("one worker alone has no link to measure; start several with torchrun.")
    return (
        _speed(lambda rows: workers.gather(rows[0], "link"), others, workers, device),
        _speed(lambda rows: workers.scatter_sum(rows, "link"), others, workers, device),
    )


def _speed(collective: Callable[[Tensor], Tensor], others: int, workers: Workers, device: torch.device) -> AlphaBeta:
    arrived, seconds = [], []
    for size in _SIZES:
        rows = torch.zeros(workers.size, max(size // 4 // workers.size, 1), device=device)
        own = []
        for _ in range(_REPEATS + 1):  # the first opens connections and is not counted
            workers.gather(torch.zeros(1, device=device), "agreement")  # all start together
            start = synchronized_time(device)
            collective(rows)
            own.append(synchronized_time(device) - start)
        arrived.append(others * rows[0].numel() * 4)
        seconds.append(median(max_over_ranks(own[1:], workers, device)))
    return AlphaBeta(*fit(arrived, seconds))
