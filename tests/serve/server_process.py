"""A real server in its own process, and a small model with random weights for it to serve."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers as hf
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.serve.test_detokenizer import byte_tokenizer
from tests.tiny import DECODER

CONTEXT = 2048
PATIENCE = 120.0  # seconds a test waits for a state, even on a slow machine
NAME = "tiny"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'developer' %}{{ raise_exception('no developers') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and an end-of-text token."""
    bytewise = byte_tokenizer()
    bytewise.add_special_tokens({"eos_token": "<end>"})
    bytewise.chat_template = TEMPLATE
    return bytewise


def language_model(context: int = CONTEXT) -> PreTrainedModel:
    torch.manual_seed(0)
    config = hf.LlamaConfig(**{**DECODER, "vocab_size": 257, "max_position_embeddings": context}, eos_token_id=256)
    network = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return network


def write_model(folder: Path, context: int = CONTEXT) -> Path:
    language_model(context).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def _client() -> httpx.Client:
    """Use a new connection for each request, so that none was closed by the server in the meantime."""
    return httpx.Client(timeout=PATIENCE, verify=False, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass
class Server:
    """A running server and its output so far."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    http: httpx.Client = field(default_factory=_client)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.http.get(self.url + path, **more)

    def post(self, path: str, content: Any, **more: Any) -> httpx.Response:
        return self.http.post(self.url + path, json=content, **more)

    def complete(self, prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def state(self) -> dict[str, Any]:
        result: dict[str, Any] = self.get("/state").json()
        return result

    def wait_until(self, condition: Any, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until the state satisfies the condition."""
        until = time.monotonic() + seconds
        while not condition(state := self.state()):
            assert time.monotonic() < until, {name: state[name] for name in ("running", "waiting", "blocks_used")}
            time.sleep(0.02)
        return state

    def wait_until_idle(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until nothing runs and every block is free."""
        return self.wait_until(
            lambda state: not (state["running"] or state["waiting"] or state["blocks_used"] or state["admitted"]),
            seconds,
        )

    def resident_bytes(self) -> int:
        """Return the resident memory of the server and its engine."""
        pids = [self.process.pid, self.state()["worker"]]
        matches = [re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()) for pid in pids]
        return sum(int(match[1]) * 1024 for match in matches if match)

    @contextmanager
    def paused(self, worker: int | None = None) -> Iterator[None]:
        """Suspend the engine's process inside the block, so that nothing finishes however slow the test is."""
        pid = self.state()["worker"] if worker is None else worker
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def wait_for_log(self, words: str) -> None:
        until = time.monotonic() + PATIENCE
        while words not in self.log.read_text():
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop the server and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def start(
    model: str | Path, folder: Path, *options: str, host: str = "127.0.0.1", own_session: bool = False,
    threads: int | None = 1,
) -> Server:  # fmt: skip
    """Start a server and wait until it is ready. In its own session it can be sent a signal with all its processes, as
    by Ctrl-C.
    """
    log = folder / f"server-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "smelt.cli.main", "serve", str(model), "--port", "0", "--host", host, *options]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=own_session,
        )
    until = time.monotonic() + 2 * PATIENCE
    while not (match := re.search(r"served at (https?)://\S+?:(\d+) ", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    return Server(process, f"{match[1]}://127.0.0.1:{match[2]}", log)


def read_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, without its end marker."""
    import json

    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines and lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
