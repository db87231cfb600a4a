"""The timelines of a run as the points of its graphs, and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smelt.loadtest.summary import tokens_by_second, under_way
from smelt.loadtest.timeline import Timeline


def series(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Milliseconds over seconds since the first request was sent; and every latency in order, for its distribution."""
    start = min((line.sent for line in timelines), default=0.0)
    answered = sorted((line for line in timelines if not line.failure), key=lambda line: line.sent)
    several = [line for line in answered if line.output_tokens > 1]
    tokens = tokens_by_second(timelines)
    return {
        "ttft": [(line.sent - start, 1000 * line.ttft) for line in answered],
        "tpot": [(line.sent - start, 1000 * line.tpot) for line in several],
        "tokens": [*((float(second), count) for second, count in enumerate(tokens)), (float(len(tokens)), 0.0)],
        "under_way": [(time - start, float(count)) for time, count in under_way(timelines)],
        "sorted": {
            "ttft": sorted(1000 * line.ttft for line in answered),
            "tpot": sorted(1000 * line.tpot for line in several),
            "itl": sorted(1000 * gap for line in answered for gap in line.gaps),
            "e2el": sorted(1000 * line.latency for line in answered),
        },
    }


def plain_timelines(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """One object a request, in milliseconds: enough to compute every figure again."""
    return [
        {
            "due": round(1000 * line.due, 3), "sent": round(1000 * line.sent, 3), "ended": round(1000 * line.ended, 3),
            "input_tokens": line.input_tokens, "output_tokens": line.output_tokens, "failure": line.failure,
            "pieces": [round(1000 * piece, 3) for piece in line.pieces],
        }
        for line in timelines
    ]  # fmt: skip
