"""The load test's metric definitions on hand-made timelines, and the distributions of its arrivals and prompts."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from smelt.errors import DataError, RequestError
from smelt.loadtest.generator import arrivals
from smelt.loadtest.http import Address
from smelt.loadtest.prompts import LengthRange, random_prompts, read_prompts
from smelt.loadtest.summary import concurrency, parse_limits, percentile, series, summarize, tokens_by_second
from smelt.loadtest.timeline import RequestTimeline

# Sent at 1 s: text at 1.2, 1.3 and 1.6, six tokens. Sent at 2 s: one token at 2.5. Failed between 2 s and 3 s.
LINES = [
    RequestTimeline(due=1.0, sent=1.0, chunk_times=[1.2, 1.3, 1.6], ended=1.6, input_tokens=10, output_tokens=6),
    RequestTimeline(due=1.9, sent=2.0, chunk_times=[2.5], ended=2.5, input_tokens=20, output_tokens=1),
    RequestTimeline(due=2.0, sent=2.0, ended=3.0, failure="status 503"),
]


def test_latencies_of_one_request() -> None:
    line = LINES[0]
    assert line.ttft == pytest.approx(0.2) and line.latency == pytest.approx(0.6)
    assert line.tpot == pytest.approx(0.4 / 5) and line.gaps == pytest.approx([0.1, 0.3])
    assert LINES[1].tpot == 0.0 and LINES[1].gaps == [] and LINES[1].late == pytest.approx(0.1)


def test_the_summary_by_hand() -> None:
    summary = summarize(LINES, {"ttft": 300.0, "tpot": 100.0})
    assert (summary.requests, summary.answered, summary.failures) == (3, 2, {"status 503": 1})
    assert summary.seconds == pytest.approx(2.0)  # 1 s to 3 s
    assert summary.requests_per_second == pytest.approx(1.0)
    assert summary.output_tokens_per_second == pytest.approx(3.5)
    assert summary.total_tokens_per_second == pytest.approx(18.5)
    assert summary.peak_tokens_per_second == pytest.approx(6.0)
    assert summary.peak_concurrency == 2
    assert (
        summary.ttft is not None and summary.ttft.mean == pytest.approx(350) and summary.ttft.p50 == pytest.approx(350)
    )
    assert summary.tpot is not None and summary.tpot.mean == pytest.approx(80)  # a single token has none
    assert summary.itl is not None and summary.itl.mean == pytest.approx(200) and summary.itl.max == pytest.approx(300)
    assert summary.e2el is not None and summary.e2el.p90 == pytest.approx(590)
    assert (summary.good, summary.goodput) == (1, pytest.approx(0.5))  # the other's first token came after 500 ms
    assert summarize(LINES).goodput is None and summarize(LINES, {"e2el": 1.0}).good == 0
    assert summarize([]).ttft is None and summarize([]).requests_per_second == 0


def test_tokens_are_counted_in_the_second_of_their_chunk() -> None:
    lines = [RequestTimeline(sent=5.0, chunk_times=[5.5, 6.5, 6.9, 8.1], ended=8.1, output_tokens=8)]
    assert tokens_by_second(lines) == [2.0, 4.0, 0.0, 2.0]
    assert concurrency(lines) == [(5.0, 1), (8.1, 0)]
    assert series(lines)["tokens"] == [(0.0, 2.0), (1.0, 4.0), (2.0, 0.0), (3.0, 2.0), (4.0, 0.0)]


def test_percentiles_match_numpy() -> None:
    rng = random.Random(0)
    for count in (1, 2, 7, 100):
        values = sorted(rng.random() for _ in range(count))
        for rank in (0, 50, 90, 99, 100):
            assert percentile(values, rank) == pytest.approx(float(np.percentile(values, rank)))


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_gaps_have_the_mean_and_spread_of_their_distribution(burstiness: float, spread: float) -> None:
    """A Gamma distribution of shape k has a deviation of 1 / sqrt(k) of its mean."""
    times = arrivals(20_001, 4.0, burstiness, seed=1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0 and statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.05)


def test_arrivals_follow_the_seed() -> None:
    assert arrivals(9, 2.0, seed=3) == arrivals(9, 2.0, seed=3) != arrivals(9, 2.0, seed=4)
    assert arrivals(3, math.inf) == [0.0] * 3
    for rate, burstiness in ((0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)):
        with pytest.raises(RequestError, match="is not possible"):
            arrivals(3, rate, burstiness)


def test_random_prompts_have_the_requested_lengths() -> None:
    prompts = random_prompts(50, LengthRange(5, 9), LengthRange(3, 4), seed=2)
    assert {len(str(prompt.content).split()) for prompt in prompts} == {5, 6, 7, 8, 9}
    assert {prompt.output for prompt in prompts} == {3, 4}
    assert (
        prompts
        == random_prompts(50, LengthRange(5, 9), LengthRange(3, 4), seed=2)
        != random_prompts(50, LengthRange(5, 9), LengthRange(3, 4))
    )


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "one", "max_tokens": 5}\n{"messages": [{"role": "user", "content": "two"}], "prompt": "2"}\n'
    )
    plain, chats = (read_prompts(file, 4, LengthRange(9, 9), chat=chat) for chat in (False, True))
    assert sorted((str(prompt.content), prompt.output) for prompt in plain) == [
        ("2", 9),
        ("2", 9),
        ("one", 5),
        ("one", 5),
    ]
    assert {prompt.messages[0]["content"] for prompt in chats} == {"one", "two"}
    for row in ('{"prompt": 3}', '{"prompt": "x", "max_tokens": -1}', '{"text": "x"}'):
        file.write_text(row)
        with pytest.raises(DataError, match="row 1 has"):
            read_prompts(file, 1, LengthRange(1, 1), chat=False)


@pytest.mark.parametrize("text", ["", "0", "-3", "9:3", "a", "1:2:3", "99999999"])
def test_invalid_lengths(text: str) -> None:
    with pytest.raises(RequestError, match="is not a length"):
        LengthRange.parse(text)


def test_lengths_and_limits_are_parsed() -> None:
    assert LengthRange.parse("128") == LengthRange(128, 128) and str(LengthRange.parse("64:256")) == "64:256"
    assert parse_limits(["ttft=500", "tpot=50"]) == {"ttft": 500.0, "tpot": 50.0}
    for word in ("ttft", "ttft=", "ttft=-1", "itl=3", "ttft=inf", "ttft=nan"):
        with pytest.raises(RequestError, match="is not a limit"):
            parse_limits([word])


def test_addresses() -> None:
    assert Address.parse("http://localhost:8000/v1/") == Address(False, "localhost", 8000, "")
    assert Address.parse("https://host/proxy") == Address(True, "host", 443, "/proxy")
    assert str(Address.parse("http://[::1]:80")) == "http://[::1]:80"
    for url in (
        "ftp://x",
        "file:///etc/passwd",
        "localhost:8000",
        "http://",
        "http://a:b@c",
        "http://x:99999",
        "http://x/ü",
    ):
        with pytest.raises(RequestError):
            Address.parse(url)
