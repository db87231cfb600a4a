"""What all requests together measured: latencies, throughput, goodput, failures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smelt.errors import RequestError
from smelt.loadtest.timeline import Timeline

PERCENTILES = (50, 90, 99)
LIMITED = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Spread:
    """A latency over all requests, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        if not seconds:
            return None
        ordered = sorted(1000 * value for value in seconds)
        p50, p90, p99 = (percentile(ordered, rank) for rank in PERCENTILES)
        return cls(math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True)
class Summary:
    """Times in milliseconds but for `seconds`, which lie between the first request sent and the last one ended."""

    requests: int
    answered: int
    failures: dict[str, int]  # by kind
    seconds: float
    input_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    peak_tokens_per_second: float  # the best of all seconds
    most_at_once: int  # requests under way
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2el: Spread | None
    late: Spread | None  # sent after they were due
    limits: dict[str, float]  # what a good request must keep to
    good: int
    goodput: float | None  # good requests a second

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(timelines: Sequence[Timeline], limits: Mapping[str, float] | None = None) -> Summary:
    """`limits` in milliseconds, of `ttft`, `tpot` and `e2el`: a request is good when it keeps to all of them."""
    limits = dict(limits or {})
    answered = [line for line in timelines if not line.failure]
    start = min((line.sent for line in timelines), default=0.0)
    seconds = max((line.ended for line in timelines), default=0.0) - start
    per_second = 1 / seconds if seconds > 0 else 0.0
    tokens = sum(line.output_tokens for line in answered)
    inputs = sum(line.input_tokens for line in answered)
    good = sum(is_good(line, limits) for line in answered)
    return Summary(
        requests=len(timelines),
        answered=len(answered),
        failures=dict(Counter(line.failure for line in timelines if line.failure).most_common()),
        seconds=seconds,
        input_tokens=inputs,
        output_tokens=tokens,
        requests_per_second=len(answered) * per_second,
        output_tokens_per_second=tokens * per_second,
        total_tokens_per_second=(tokens + inputs) * per_second,
        peak_tokens_per_second=max(tokens_by_second(timelines), default=0.0),
        most_at_once=max((count for _, count in under_way(timelines)), default=0),
        ttft=Spread.of([line.ttft for line in answered]),
        tpot=Spread.of([line.tpot for line in answered if line.output_tokens > 1]),
        itl=Spread.of([gap for line in answered for gap in line.gaps]),
        e2el=Spread.of([line.latency for line in answered]),
        late=Spread.of([line.late for line in timelines]),
        limits=limits,
        good=good,
        goodput=good * per_second if limits else None,
    )


def is_good(line: Timeline, limits: Mapping[str, float]) -> bool:
    found = {"ttft": line.ttft, "tpot": line.tpot, "e2el": line.latency}
    return all(1000 * found[name] <= limit for name, limit in limits.items())


def percentile(ordered: Sequence[float], rank: float) -> float:
    """Between the two nearest values, as NumPy has it."""
    place = (len(ordered) - 1) * rank / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def tokens_by_second(timelines: Sequence[Timeline]) -> list[float]:
    """Output tokens that came in each second since the first request. A piece counts for an equal share of its
    request's tokens, since a server may send several tokens at once."""
    start = min((line.sent for line in timelines), default=0.0)
    bins: Counter[int] = Counter()
    for line in timelines:
        for piece in line.pieces if line.output_tokens else ():
            bins[int(piece - start)] += line.output_tokens / len(line.pieces)  # type: ignore[assignment]
    return [float(bins[second]) for second in range(max(bins, default=-1) + 1)]


def under_way(timelines: Sequence[Timeline]) -> list[tuple[float, int]]:
    """How many requests there were at once, at each time at which that changed."""
    changes = sorted([(line.sent, 1) for line in timelines] + [(line.ended, -1) for line in timelines])
    found, count = [], 0
    for time, change in changes:
        count += change
        found.append((time, count))
    return found


def limits_from(words: Sequence[str]) -> dict[str, float]:
    """`ttft=500` as {"ttft": 500.0}."""
    limits = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in LIMITED or not 0 < limits[name] < math.inf:
            raise RequestError(f"{word!r:.40} is no limit; write milliseconds, such as ttft=500, tpot=50 or e2el=9000.")
    return limits
