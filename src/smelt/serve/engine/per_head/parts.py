"""Into how many parts the keys of each head are split when tokens are decoded: chosen before, from the budgets alone.

Tangram (Kim et al., 2026, arXiv 2606.06302) has such a table a group of heads, in proportion to its budget; the
profile's says how groups compare. Here it becomes counts for a number of requests and a chip: of several ways to cut,
in proportion and alike, the one that ends first if programs begin in the order of their length wherever there is room.
Budgets are shares of a text, so that it holds for all texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

MOST_PARTS = 64  # of a head
# Both fitted to times of one skewed profile on an H200, 1 to 64 requests; they are not read from the chip.
AT_ONCE = 4  # programs that run on a multiprocessor at once
OVERHEAD = 0.0025  # what a program costs besides its keys, as a share of those of a head that keeps most
Loads = np.ndarray[Any, np.dtype[np.float64]]


@lru_cache(maxsize=4096)
def parts_of(shares: tuple[int, ...], requests: int, processors: int, most: int = MOST_PARTS) -> tuple[int, ...]:
    """For the heads of a layer, whose shares are not all the same."""
    room = AT_ONCE * processors
    return min(_ways(shares, requests, room, most), key=lambda parts: _ends(shares, parts, requests, room))


def work_of(shares: Sequence[int], parts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Head, part and parts of that head for each program; long ones begin first."""
    heads = sorted(range(len(shares)), key=lambda head: -shares[head] / parts[head])
    return [(head, part, parts[head]) for head in heads for part in range(parts[head])]


def _ways(shares: tuple[int, ...], requests: int, room: int, most: int) -> Iterator[tuple[int, ...]]:
    """Nothing split; and whatever makes a few times more programs than there is room for."""
    yield (1,) * len(shares)
    for count in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        if count > most:
            return
        for parts in (tuple(math.ceil(share * count / max(shares)) for share in shares), (count,) * len(shares)):
            if requests * sum(parts) <= 10 * room:
                yield parts


def _ends(shares: tuple[int, ...], parts: tuple[int, ...], requests: int, room: int) -> float:
    """When the last program ends."""
    loads = np.zeros(room)
    for size in sorted({share / count for share, count in zip(shares, parts, strict=True)}, reverse=True):
        number = sum(count for share, count in zip(shares, parts, strict=True) if share / count == size)
        loads = _filled(loads, size / max(shares) + OVERHEAD, requests * number)
    return float(loads.max())


def _filled(loads: Loads, size: float, number: int) -> Loads:
    """So many equal programs more, each where there is room first."""
    rounds = number // len(loads) + 2 + int((loads.max() - loads.min()) / size)
    begins = loads[:, None] + size * np.arange(rounds)  # [room, programs that might follow there]
    last = np.partition(begins.ravel(), number - 1)[number - 1]
    taken = (begins < last).sum(axis=1)
    taken[np.flatnonzero((begins == last).any(axis=1))[: number - taken.sum()]] += 1
    return loads + size * taken
