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

MAX_SPLITS = 64  # of a head
# Both fitted to timings of one skewed profile on an H200 with 1 to 64 requests, not queried from the GPU.
PROGRAMS_PER_SM = 4  # that run concurrently
OVERHEAD = 0.0025  # fixed cost of a program, relative to the keys of the head with the largest budget
Loads = np.ndarray[Any, np.dtype[np.float64]]


@lru_cache(maxsize=4096)
def choose_num_splits(
    shares: tuple[int, ...], num_requests: int, num_sms: int, max_splits: int = MAX_SPLITS
) -> tuple[int, ...]:
    """Return the splits of each head of a layer whose shares differ."""
    num_slots = PROGRAMS_PER_SM * num_sms
    candidates = _candidates(shares, num_requests, num_slots, max_splits)
    return min(candidates, key=lambda splits: _makespan(shares, splits, num_requests, num_slots))


def build_split_work(shares: Sequence[int], splits: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (head, split, splits of that head) for each program, longest first."""
    heads = sorted(range(len(shares)), key=lambda head: -shares[head] / splits[head])
    return [(head, split, splits[head]) for head in heads for split in range(splits[head])]


def _candidates(
    shares: tuple[int, ...], num_requests: int, num_slots: int, max_splits: int
) -> Iterator[tuple[int, ...]]:
    """Yield candidate splits: none, and those with at most 10 times as many programs as run concurrently."""
    yield (1,) * len(shares)
    for count in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        if count > max_splits:
            return
        for splits in (tuple(math.ceil(share * count / max(shares)) for share in shares), (count,) * len(shares)):
            if num_requests * sum(splits) <= 10 * num_slots:
                yield splits


def _makespan(shares: tuple[int, ...], splits: tuple[int, ...], num_requests: int, num_slots: int) -> float:
    """Simulate longest-first scheduling; return when the last program ends."""
    loads = np.zeros(num_slots)
    for size in sorted({share / count for share, count in zip(shares, splits, strict=True)}, reverse=True):
        num_programs = sum(count for share, count in zip(shares, splits, strict=True) if share / count == size)
        loads = _assign(loads, size / max(shares) + OVERHEAD, num_requests * num_programs)
    return float(loads.max())


def _assign(loads: Loads, size: float, num_programs: int) -> Loads:
    """Add equal programs, each to the least loaded slot."""
    rounds = num_programs // len(loads) + 2 + int((loads.max() - loads.min()) / size)
    starts = loads[:, None] + size * np.arange(rounds)  # [slots, candidate programs]
    last_start = np.partition(starts.ravel(), num_programs - 1)[num_programs - 1]
    assigned = (starts < last_start).sum(axis=1)
    assigned[np.flatnonzero((starts == last_start).any(axis=1))[: num_programs - assigned.sum()]] += 1
    return loads + size * assigned
