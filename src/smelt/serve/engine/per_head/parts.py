"""Choose the number of KV splits of each head for decoding, from the eviction budgets alone.

Tangram (Kim et al., 2026, arXiv 2606.06302) has a table with splits per head group, proportional to its budget. Here,
for a number of requests and SMs, several ways to split, proportional and uniform, are simulated with longest-first
scheduling, and the one with the shortest makespan is taken. Budgets are shares of a text, so it holds for all lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

MOST_PARTS = 64  # max splits of a head
# Both fitted to timings of one skewed profile on an H200 with 1 to 64 requests, not queried from the GPU.
AT_ONCE = 4  # concurrent programs per SM
OVERHEAD = 0.0025  # fixed cost of a program, relative to the keys of the head with the largest budget
Loads = np.ndarray[Any, np.dtype[np.float64]]


@lru_cache(maxsize=4096)
def parts_of(shares: tuple[int, ...], requests: int, processors: int, most: int = MOST_PARTS) -> tuple[int, ...]:
    """Return the splits of each head of a layer whose shares differ."""
    slots = AT_ONCE * processors
    return min(_ways(shares, requests, slots, most), key=lambda parts: _ends(shares, parts, requests, slots))


def work_of(shares: Sequence[int], parts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (head, split, splits of that head) for each program, longest first."""
    heads = sorted(range(len(shares)), key=lambda head: -shares[head] / parts[head])
    return [(head, part, parts[head]) for head in heads for part in range(parts[head])]


def _ways(shares: tuple[int, ...], requests: int, room: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield candidate splits: none, and those with at most 10 times as many programs as run concurrently."""
    yield (1,) * len(shares)
    for count in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        if count > most:
            return
        for parts in (tuple(math.ceil(share * count / max(shares)) for share in shares), (count,) * len(shares)):
            if requests * sum(parts) <= 10 * room:
                yield parts


def _ends(shares: tuple[int, ...], parts: tuple[int, ...], requests: int, room: int) -> float:
    """Return the makespan."""
    loads = np.zeros(room)
    for size in sorted({share / count for share, count in zip(shares, parts, strict=True)}, reverse=True):
        num_programs = sum(count for share, count in zip(shares, parts, strict=True) if share / count == size)
        loads = _filled(loads, size / max(shares) + OVERHEAD, requests * num_programs)
    return float(loads.max())


def _filled(loads: Loads, size: float, number: int) -> Loads:
    """Add `number` equal programs, each to the least loaded slot."""
    rounds = number // len(loads) + 2 + int((loads.max() - loads.min()) / size)
    starts = loads[:, None] + size * np.arange(rounds)  # [slots, candidate programs]
    last_start = np.partition(starts.ravel(), number - 1)[number - 1]
    assigned = (starts < last_start).sum(axis=1)
    assigned[np.flatnonzero((starts == last_start).any(axis=1))[: number - assigned.sum()]] += 1
    return loads + size * assigned
