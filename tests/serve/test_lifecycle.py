"""Engine killed, server stopped: what clients see, and how the process ends. (A server that gives up is tested by the
teardown of the fixture `keyed`, an interrupted one by that of `server`.)
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.serve.server_process import NAME, PATIENCE, Server, start, write_model

CONTEXT = 32768  # answers of this length cannot finish during a test
LONG = {"prompt": "x", "max_tokens": 32000, "ignore_eos": True, "n": 16}
SHORT = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 0}


class Reader(threading.Thread):
    """Read one answer to its end in the background."""

    def __init__(self, server: Server, body: dict[str, Any], tokens: int = 0) -> None:
        """`begun` is set at the first line with at least so many tokens, which are counted by their logprobs."""
        super().__init__(daemon=True)
        self.server, self.body, self.first_tokens = server, body, tokens
        self.begun, self.lines = threading.Event(), list[str]()
        self.status = 0
        self.start()

    def run(self) -> None:
        url = self.server.url + "/v1/completions"
        with self.server.http.stream("POST", url, json=self.body, timeout=PATIENCE) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                self.lines += [line] if line else []
                if self.lines and self.count_tokens() >= self.first_tokens:
                    self.begun.set()

    def count_tokens(self) -> int:
        if not self.first_tokens:
            return 0
        events = [json.loads(line.removeprefix("data: ")) for line in self.lines if line != "data: [DONE]"]
        return sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events)

    def read(self) -> None:
        """Wait until the answer has ended."""
        self.join(PATIENCE)
        assert not self.is_alive()

    @property
    def error(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.lines[-2].removeprefix("data: "))
        return event["error"]


def test_a_killed_engine_is_restarted_and_a_stopped_server_finishes_short_answers(tmp_path: Path) -> None:
    """One server for both, since starting one takes seconds."""
    model = write_model(tmp_path / NAME, CONTEXT)
    server = start(
        model,
        tmp_path,
        "--max-restarts",
        "1",
        "--shutdown-timeout",
        "5",
        "--kv-cache-gib",
        "0.2",
        "--max-model-len",
        str(CONTEXT),
    )
    try:
        _kill_engine(server)
        _stop_server(server)
    finally:
        if server.process.poll() is None:
            server.process.kill()


def _kill_engine(server: Server) -> None:
    expected = server.complete("hello", max_tokens=20)["choices"]
    streams = [Reader(server, {**LONG, "stream": True}) for _ in range(2)]
    complete = Reader(server, LONG)
    assert all(reader.begun.wait(PATIENCE) and reader.status == 200 for reader in streams), streams[0].lines
    killed = server.wait_until(lambda state: state["running"] == 48)["worker"]
    os.kill(killed, signal.SIGKILL)
    for reader in (*streams, complete):  # none waits for the new engine or a timeout of minutes
        reader.read()
    for reader in streams:
        assert reader.status == 200 and reader.error["code"] == "engine_died" and reader.lines[-1] == "data: [DONE]"
    assert complete.status == 500 and json.loads(complete.lines[0])["error"]["code"] == "engine_died"
    started = server.wait_until(lambda state: state["worker"] != killed)["worker"]
    with server.paused(started):  # the new process cannot be ready before this is seen
        health = server.get("/health")
        assert health.status_code == 503 and "not running" in health.text
        meanwhile = server.post("/v1/completions", {"prompt": "x"})
        assert meanwhile.status_code == 503 and "retry-after" in meanwhile.headers
    state = server.wait_until(lambda state: not state["unhealthy_reason"])
    assert server.get("/health").status_code == 200
    assert state["restarts"] == 1 and state["blocks_used"] == 0 and state["finished"]["error"] == 48
    assert server.complete("hello", max_tokens=20)["choices"] == expected


def _stop_server(server: Server) -> None:
    """Short answers finish, long ones are cut off with an error, and no process is left."""
    worker = server.state()["worker"]
    long = Reader(server, {**LONG, "n": 4, "stream": True})
    assert long.begun.wait(PATIENCE)
    short = Reader(server, SHORT, tokens=SHORT["max_tokens"] - 30)
    assert short.begun.wait(PATIENCE)
    with server.paused(worker):  # the rest of the short answer is computed after the signal
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("stopping; requests have 5 seconds")
    short.read()
    long.read()
    assert server.process.wait(PATIENCE) == 0
    finished = [json.loads(line.removeprefix("data: ")) for line in short.lines[:-1]]
    assert finished[-1]["choices"][0]["finish_reason"] == "length" and short.lines[-1] == "data: [DONE]"
    assert long.error["code"] == "shutting_down" and long.lines[-1] == "data: [DONE]"
    assert not Path(f"/proc/{worker}").exists()


def test_a_port_in_use_and_a_missing_extra(server: Server, model_folder: Path) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "smelt.cli.main", "serve", str(model_folder), "--port", port]
    taken = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert taken.returncode == 2 and "cannot listen" in taken.stderr and "Traceback" not in taken.stderr
    code = (
        "import sys; sys.modules.update(fastapi=None, uvicorn=None, starlette=None)\n"
        "from smelt.cli.main import main; main(['serve', 'x'])"
    )
    missing = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert missing.returncode == 2 and "pip install 'smeltml[serve]'" in missing.stderr


@pytest.mark.parametrize("until", [b"0/1", b"is served at"])
def test_a_terminal_shows_the_progress_of_a_start(model_folder: Path, until: bytes) -> None:
    """And its cursor again, also if the engine is stopped while it loads."""
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "smelt.cli.main", "serve", str(model_folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown, stopped = b"", False
    with suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as output:  # an error: all processes have ended
        while piece := output.read(65536):
            shown += piece
            if not stopped and until in shown:
                stopped = True
                process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0, shown
    assert b"loading the model" in shown and b"0/1" in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor stays hidden"
