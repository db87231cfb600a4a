"""Into how many parts the keys of each head are split when tokens are decoded: made before, in proportion to budgets.

Tangram (Kim et al., 2026, arXiv 2606.06302) has such a table a group of heads; the profile's says how groups compare.
Here it becomes counts for a number of requests and a chip. Budgets are shares of a text, and so it holds for all texts.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_PARTS = 64  # of a head
AT_ONCE = 2  # programs that a multiprocessor has room for
EVEN = 1.15  # a longest part is so much longer than the mean, at most, where all run at once


def parts_of(
    shares: Sequence[int], requests: int, processors: int, most: int = MOST_PARTS, waves: int = 4
) -> list[int]:
    """As many programs as run at once, where these can be made about equally long. Otherwise there are several waves of
    shorter ones, so that the last to end are few and short."""
    room = AT_ONCE * processors / max(requests, 1)  # programs of a request that run at once
    even = _evened(shares, int(room), most)
    if _longest(shares, even) * room <= EVEN * sum(shares):
        return even
    programs = max(waves * processors / max(requests, 1), 1.0)
    return [min(max(round(share * programs / sum(shares)), 1), most) for share in shares]


def work_of(shares: Sequence[int], parts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Head, part and parts of that head for each program; long ones begin first."""
    heads = sorted(range(len(shares)), key=lambda head: -shares[head] / parts[head])
    return [(head, part, parts[head]) for head in heads for part in range(parts[head])]


def _evened(shares: Sequence[int], programs: int, most: int) -> list[int]:
    """One part more for the head whose parts are longest, as long as programs are left and it shortens the longest."""
    parts = [1] * len(shares)
    best = list(parts)
    for _ in range(programs - len(shares)):
        head = max(range(len(shares)), key=lambda each: shares[each] / parts[each])
        if parts[head] == most:
            break
        parts[head] += 1
        if _longest(shares, parts) < _longest(shares, best):
            best = list(parts)
    return best


def _longest(shares: Sequence[int], parts: Sequence[int]) -> float:
    return max(share / count for share, count in zip(shares, parts, strict=True))
