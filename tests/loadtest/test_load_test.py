"""The load generator against a real server with known delays."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from smelt.errors import RequestError
from smelt.loadtest.client import Endpoint, complete
from smelt.loadtest.generator import LoadTest, LoadTestResult, load_test
from smelt.loadtest.http import Address
from smelt.loadtest.prompts import LengthRange, Prompt
from smelt.loadtest.timeline import RequestTimeline
from tests.cli.conftest import Smelt, smelt_here  # noqa: F401
from tests.loadtest.sse_server import LockstepClock, SseServer

SHORT = {"input": LengthRange(5, 5), "output": LengthRange(8, 8)}


def run_load_test(server: SseServer, **options: Any) -> LoadTestResult:
    return load_test(LoadTest(server.url, **{"requests": 10, "rate": math.inf, **SHORT, **options}))


def time_one(server: SseServer, chat: bool = False) -> RequestTimeline:
    """Stream one completion of 8 tokens on the clock of the server."""
    server.clock = LockstepClock()
    endpoint = Endpoint(Address.parse(server.url), "tiny", chat=chat, seconds=60)
    return asyncio.run(complete(endpoint, Prompt("one two", 8), server.clock))


@pytest.mark.parametrize("chat", [False, True])
def test_times_are_those_of_the_server(chat: bool) -> None:
    with SseServer(first=0.15, gap=0.03) as server:
        line = time_one(server, chat)
    assert not line.failure and (line.input_tokens, line.output_tokens) == (7, 8)  # as the server counted
    assert line.ttft == pytest.approx(0.15) and line.gaps == pytest.approx([0.03] * 7)
    assert line.tpot == pytest.approx(0.03) and line.latency == pytest.approx(0.36)


@pytest.mark.parametrize("chat", [False, True])
def test_a_run_is_summarized(chat: bool) -> None:
    """A client can only be later than the server."""
    with SseServer(first=0.15, gap=0.03, hold=10) as server:
        summary = run_load_test(server, chat=chat, warmups=0, limits={"ttft": 148.0, "e2el": 1e6}).summary
    assert summary.answered == 10 and not summary.failures
    assert summary.ttft and summary.tpot and summary.itl and summary.e2el
    assert summary.ttft.p50 >= 149 and summary.e2el.p50 >= 359
    assert summary.output_tokens == 80 and summary.input_tokens == 70
    assert summary.peak_concurrency == 10 and summary.good == 0  # none has its first token within 148 ms


def test_tokens_are_counted_by_usage_or_else_by_chunks() -> None:
    with SseServer(together=4, gap=0.04) as server:
        line = time_one(server)
        assert line.output_tokens == 8 and len(line.chunk_times) == 2
        assert line.tpot == pytest.approx(0.04 / 7)  # one gap over 7 tokens
        server.usage = False
        assert time_one(server).output_tokens == 2


def test_the_loop_is_open() -> None:
    """Requests are sent on schedule even if none has been answered; with a limit they wait in the client."""
    with SseServer(first=0.5, hold=10) as server:  # which a client that waits for answers would never get
        result = run_load_test(server, rate=40.0, seed=5, warmups=0)
        assert server.most_at_once == 10
        assert all(line.late >= 0 for line in result.timelines) and result.timelines[-1].due > 0.05
        limited = run_load_test(server, rate=40.0, seed=5, max_concurrency=4, warmups=0).timelines
    assert [line.due for line in limited] == [line.due for line in result.timelines]
    waited = [line for line in limited if line.late > 0.5]
    assert len(waited) >= 2


def test_concurrency_is_limited() -> None:
    with SseServer(first=0.05, gap=0.0) as server:
        assert run_load_test(server, max_concurrency=3, warmups=0).summary.peak_concurrency == 3
        assert server.most_at_once == 3


def test_request_bodies() -> None:
    with SseServer(first=0, gap=0, tokenizes=True) as server:
        result = run_load_test(server, requests=3, input=LengthRange(4, 6), warmups=2, seed=9)
        sent = [body["prompt"] for body in server.bodies]
        assert result.settings["input_unit"] == "tokens" and len(sent) == 5
        assert all(isinstance(prompt, list) and 4 <= len(prompt) <= 6 for prompt in sent)
        body = server.bodies[0]
        assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("tiny", 8, True, True)
        assert body["stream_options"] == {"include_usage": True}
        server.tokenizes, server.bodies = False, []
        assert run_load_test(server, requests=3, ignore_eos=False, seed=9).settings["input_unit"] == "words"
        assert "ignore_eos" not in server.bodies[0] and len(server.bodies[1]["prompt"].split()) == 5


def test_failures_are_counted_by_kind() -> None:
    kinds = {1: "503", 2: "cut", 3: "error", 4: "slow", 5: "429", 6: "429"}
    with SseServer(first=0.01, gap=0.001, fails=lambda number: kinds.get(number - 1, "")) as server:
        summary = run_load_test(server, seconds=5.0).summary
    assert summary.failures == {
        "status 429": 2, "status 503": 1, "cut off": 1, "error in the stream": 1, "timed out": 1,
    }  # fmt: skip
    assert summary.answered == 4 and summary.ttft is not None


def test_invalid_options_are_one_sentence() -> None:
    with SseServer(first=0, gap=0, key="secret", models=("a", "b")) as server:
        with pytest.raises(RequestError, match=r"requires an API key \(status 401\); pass its file"):
            run_load_test(server)
        with pytest.raises(RequestError, match="has no model 'c'; it has a, b"):
            run_load_test(server, key="secret", model="c")
        assert run_load_test(server, key="secret", model="b").settings["model"] == "b"
        assert "secret" not in str(run_load_test(server, key="secret").settings)
        server.fails = lambda number: "503"
        with pytest.raises(RequestError, match=r"answered with status 503 \(the queue is full\)"):
            run_load_test(server, key="secret")
        with pytest.raises(RequestError, match="all 10 requests failed, the first with: status 503"):
            run_load_test(server, key="secret", warmups=0)
        url = server.url
    with pytest.raises(RequestError, match="does not answer"):
        load_test(LoadTest(url))


def test_the_command(smelt_here: Smelt, tmp_path: Path) -> None:  # noqa: F811
    key = tmp_path / "key"
    key.write_text("secret\n")
    files = ["-o", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json")]
    with SseServer(first=0.02, gap=0.002, key="secret", fails=lambda number: "429" if number == 3 else "") as server:
        options = [
            "--request-rate",
            "50",
            "--num-requests",
            "12",
            "--input-len",
            "3:6",
            "--output-len",
            "4",
            "--seed",
            "1",
        ]
        limits = ["--slo", "ttft=500", "--slo", "tpot=50", "--api-key-file", str(key)]
        done = smelt_here("load-test", server.url, *options, *limits, *files)
        assert done.code == 0, done.err
        smelt_here("load-test", server.url).refused("requires an API key")
        smelt_here("load-test", server.url, "--slo", "speed=3").refused("is not a limit")
        smelt_here("load-test", server.url, "--input-len", "x").refused("is not a length")
    smelt_here("load-test", "ftp://localhost").refused("is not the address of a server")
    smelt_here("load-test", "http://127.0.0.1:1").refused("does not answer")
    assert (
        "11 of 12" in done.out and "failed: status 429" in done.out and "goodput (ttft 500 ms, tpot 50 ms)" in done.out
    )
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["summary"]["answered"] == 11 and len(result["requests"]) == 12 and "secret" not in str(result)
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") >= 16 and "polyline" in page and "http-equiv" in page and "<script" not in page
    assert len(re.findall(r'class="axis-title y-title">[^<]+<', page)) == page.count('class="graph"') > 4
    assert "nan" not in page and "1 of 12 requests failed" in page


def test_control_c_reports_finished_requests(tmp_path: Path) -> None:
    with SseServer(first=0.02, gap=0.001) as server:
        arguments = [
            "load-test",
            server.url,
            "--request-rate",
            "20",
            "--num-requests",
            "400",
            "--input-len",
            "3",
            "--output-len",
            "4",
        ]
        command = [sys.executable, "-m", "smelt.cli.main", *arguments, "--json", str(tmp_path / "r.json")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while len(server.bodies) < 10:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0 and "stopped; only finished requests are included" in stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["stopped"] and 5 <= result["summary"]["answered"] < 400
