"""Simulate a link and a CPU of known speed, so that whatever `auto` measures is the same in every run.

The clock advances by the modeled time of each collective and by a constant at each reading, which stands for the
compute in between. Real times, CPU times too, grow on a busy machine, and `auto` would then choose otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as distributed
from torch import Tensor

import smelt.train.gradients.autotune.auto
import smelt.train.gradients.comm
import smelt.train.timing

ALPHA = 0.001  # seconds
BANDWIDTH = 20e6  # received bytes per second and rank
COMPUTE = 0.0001  # seconds between two readings of the clock
_seconds = 0.0


def simulate_link(
    alpha: float = ALPHA, bandwidth: float = BANDWIDTH, compute: float = COMPUTE, ranks_per_node: int | None = None
) -> None:
    """Let every collective take its modeled time, for the rest of this process; inside a node it takes none."""

    def read_clock() -> float:
        return _advance(compute)

    modules: tuple[Any, ...] = (smelt.train.timing, smelt.train.gradients.autotune.auto)
    for module in modules:
        module.perf_counter = read_clock
    comm: Any = smelt.train.gradients.comm
    # The bytes that arrive, as a share of the first tensor (for a gather, the output buffer), of n ranks
    shares: list[tuple[Any, str, Callable[[int], float]]] = [
        (distributed, "all_reduce", lambda n: 2 * (n - 1) / n),
        (distributed, "broadcast", lambda n: 1.0),
        (distributed, "all_to_all_single", lambda n: (n - 1) / n),
        (comm, "_all_gather", lambda n: (n - 1) / n),
    ]
    for module, name, share in shares:
        setattr(module, name, _timed(getattr(module, name), share, alpha, bandwidth, ranks_per_node))


def _advance(seconds: float) -> float:
    global _seconds
    _seconds += seconds
    return _seconds


def _timed(
    work: Callable[..., Any], share: Callable[[int], float], alpha: float, bandwidth: float, ranks_per_node: int | None
) -> Callable[..., Any]:
    def timed(tensor: Tensor, *arguments: Any, group: Any = None, **options: Any) -> Any:
        ranks = distributed.get_process_group_ranks(group)
        inside_node = ranks_per_node is not None and len({rank // ranks_per_node for rank in ranks}) == 1
        if not inside_node:
            _advance(alpha + share(len(ranks)) * tensor.numel() * tensor.element_size() / bandwidth)
        return work(tensor, *arguments, group=group, **options)

    return timed
