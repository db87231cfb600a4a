"""Summarize a load test: latencies, throughput, goodput, failures, and series for plots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smelt.errors import RequestError
from smelt.loadtest.timeline import RequestTimeline

PERCENTILES = (50, 90, 99)
OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class LatencyStats:
    """A latency over all requests, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def from_seconds(cls, seconds: Sequence[float]) -> LatencyStats | None:
        if not seconds:
            return None
        ordered = sorted(1000 * value for value in seconds)
        p50, p90, p99 = (percentile(ordered, rank) for rank in PERCENTILES)
        return cls(math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True)
class Summary:
    """Latencies in milliseconds; `seconds` from the first request sent to the last one finished."""

    requests: int
    answered: int
    failures: dict[str, int]  # by kind
    seconds: float
    input_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    peak_tokens_per_second: float  # over the best second
    peak_concurrency: int
    ttft: LatencyStats | None
    tpot: LatencyStats | None
    itl: LatencyStats | None
    e2el: LatencyStats | None
    late: LatencyStats | None  # delay between schedule and sending
    limits: dict[str, float]  # latency objectives of goodput
    good: int
    goodput: float | None  # requests per second that meet all objectives

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(timelines: Sequence[RequestTimeline], limits: Mapping[str, float] | None = None) -> Summary:
    """Summarize a run. `limits` are goodput objectives in milliseconds for `ttft`, `tpot` and `e2el`."""
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
        peak_concurrency=max((count for _, count in concurrency(timelines)), default=0),
        ttft=LatencyStats.from_seconds([line.ttft for line in answered]),
        tpot=LatencyStats.from_seconds([line.tpot for line in answered if line.output_tokens > 1]),
        itl=LatencyStats.from_seconds([gap for line in answered for gap in line.gaps]),
        e2el=LatencyStats.from_seconds([line.latency for line in answered]),
        late=LatencyStats.from_seconds([line.late for line in timelines]),
        limits=limits,
        good=good,
        goodput=good * per_second if limits else None,
    )


def is_good(line: RequestTimeline, limits: Mapping[str, float]) -> bool:
    latencies = {"ttft": line.ttft, "tpot": line.tpot, "e2el": line.latency}
    return all(1000 * latencies[name] <= limit for name, limit in limits.items())


def percentile(ordered: Sequence[float], rank: float) -> float:
    """Interpolate linearly between the two nearest values, as NumPy does."""
    position = (len(ordered) - 1) * rank / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def tokens_by_second(timelines: Sequence[RequestTimeline]) -> list[float]:
    """Return the output tokens in each second since the first request. Every chunk counts for an equal share of its
    request's tokens, since a server may send several tokens at once."""
    start = min((line.sent for line in timelines), default=0.0)
    bins: Counter[int] = Counter()
    for line in timelines:
        for chunk_time in line.chunk_times if line.output_tokens else ():
            bins[int(chunk_time - start)] += line.output_tokens / len(line.chunk_times)  # type: ignore[assignment]
    return [float(bins[second]) for second in range(max(bins, default=-1) + 1)]


def concurrency(timelines: Sequence[RequestTimeline]) -> list[tuple[float, int]]:
    """Return the number of concurrent requests at each time when it changes."""
    changes = sorted([(line.sent, 1) for line in timelines] + [(line.ended, -1) for line in timelines])
    points, count = [], 0
    for time, change in changes:
        count += change
        points.append((time, count))
    return points


def parse_limits(words: Sequence[str]) -> dict[str, float]:
    """Parse `ttft=500` to {"ttft": 500.0}."""
    limits = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in OBJECTIVES or not 0 < limits[name] < math.inf:
            raise RequestError(
                f"{word!r:.40} is not a limit; use milliseconds, such as ttft=500, tpot=50 or e2el=9000."
            )
    return limits


def series(timelines: Sequence[RequestTimeline]) -> dict[str, Any]:
    """Return latencies in milliseconds over seconds since the first request, and sorted for their distributions."""
    start = min((line.sent for line in timelines), default=0.0)
    answered = sorted((line for line in timelines if not line.failure), key=lambda line: line.sent)
    several = [line for line in answered if line.output_tokens > 1]
    tokens = tokens_by_second(timelines)
    return {
        "ttft": [(line.sent - start, 1000 * line.ttft) for line in answered],
        "tpot": [(line.sent - start, 1000 * line.tpot) for line in several],
        "tokens": [*((float(second), count) for second, count in enumerate(tokens)), (float(len(tokens)), 0.0)],
        "concurrency": [(time - start, float(count)) for time, count in concurrency(timelines)],
        "sorted": {
            "ttft": sorted(1000 * line.ttft for line in answered),
            "tpot": sorted(1000 * line.tpot for line in several),
            "itl": sorted(1000 * gap for line in answered for gap in line.gaps),
            "e2el": sorted(1000 * line.latency for line in answered),
        },
    }


def timelines_to_json(timelines: Sequence[RequestTimeline]) -> list[dict[str, Any]]:
    """Return one object per request, times in milliseconds: enough to recompute every figure."""
    return [
        {
            "due": round(1000 * line.due, 3), "sent": round(1000 * line.sent, 3), "ended": round(1000 * line.ended, 3),
            "input_tokens": line.input_tokens, "output_tokens": line.output_tokens, "failure": line.failure,
            "pieces": [round(1000 * chunk_time, 3) for chunk_time in line.chunk_times],
        }
        for line in timelines
    ]  # fmt: skip
