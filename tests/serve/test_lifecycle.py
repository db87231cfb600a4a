"""The engine killed, the server stopped: what clients see, and how the process ends. (A server that gives up is the end
of the fixture `keyed`, one that is interrupted that of `server`.)"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.serve.served import Server, start

LONG = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "n": 16}


class Reader(threading.Thread):
    """Reads one answer to its end, in the background."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.server, self.body = server, body
        self.begun, self.lines, self.ended = threading.Event(), list[str](), 0.0
        self.status = 0
        self.start()

    def run(self) -> None:
        with self.server.http.stream("POST", self.server.url + "/v1/completions", json=self.body, timeout=60) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                self.lines += [line] if line else []
                self.begun.set()
        self.ended = time.monotonic()

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.lines[-2].removeprefix("data: "))["error"]
        return found


def test_a_killed_engine_is_started_again_and_a_stopped_server_finishes_what_it_can(
    model_folder: Path, tmp_path: Path
) -> None:
    """One server for both, since starting one takes seconds."""
    server = start(model_folder, tmp_path, "--restarts", "1", "--grace", "2", "--cache-gib", "0.02")
    try:
        _killed(server)
        _stopped(server)
    finally:
        if server.process.poll() is None:
            server.process.kill()


def _killed(server: Server) -> None:
    wanted = server.complete("hello", max_tokens=20)["choices"]
    streams = [Reader(server, {**LONG, "stream": True}) for _ in range(2)]
    whole = Reader(server, LONG)
    assert all(each.begun.wait(20) for each in streams)
    server.wait_until(lambda state: state["running"] == 48)
    os.kill(server.state()["worker"], signal.SIGKILL)
    killed = time.monotonic()
    for each in (*streams, whole):
        each.join(10)
        assert each.ended - killed < 2
    for each in streams:
        assert each.status == 200 and each.error["code"] == "engine_died" and each.lines[-1] == "data: [DONE]"
    assert whole.status == 500 and json.loads(whole.lines[0])["error"]["code"] == "engine_died"
    health = server.get("/health")
    assert health.status_code == 503 and "not running" in health.text
    meanwhile = server.post("/v1/completions", {"prompt": "x"})
    assert meanwhile.status_code == 503 and "retry-after" in meanwhile.headers
    state = server.wait_until(lambda state: not state["trouble"], 60)
    assert server.get("/health").status_code == 200
    assert state["restarts"] == 1 and state["blocks_used"] == 0 and state["ended"]["error"] == 48
    assert server.complete("hello", max_tokens=20)["choices"] == wanted


def _stopped(server: Server) -> None:
    """Short answers are finished, long ones cut off with an error, and nothing is left."""
    worker = server.state()["worker"]
    long = Reader(server, {**LONG, "n": 64, "stream": True})
    short = Reader(server, {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "stream": True})
    assert long.begun.wait(20) and short.begun.wait(20)
    asked = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert time.monotonic() - asked < 12
    long.join(5)
    short.join(5)
    finished = [json.loads(line.removeprefix("data: ")) for line in short.lines[:-1]]
    assert finished[-1]["choices"][0]["finish_reason"] == "length" and short.lines[-1] == "data: [DONE]"
    assert long.error["code"] == "shutting_down" and long.lines[-1] == "data: [DONE]"
    assert 1.5 < long.ended - asked < 6
    assert not Path(f"/proc/{worker}").exists()


def test_a_port_that_is_taken_and_an_extra_that_is_missing(server: Server, model_folder: Path) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "smelt.cli.main", "serve", str(model_folder), "--port", port]
    taken = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert taken.returncode == 2 and "cannot listen" in taken.stderr and "Traceback" not in taken.stderr
    code = (
        "import sys; sys.modules.update(fastapi=None, uvicorn=None, starlette=None)\n"
        "from smelt.cli.main import main; main(['serve', 'x'])"
    )
    missing = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert missing.returncode == 2 and "pip install 'smelt[serve]'" in missing.stderr
