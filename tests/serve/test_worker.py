"""The engine in its own process: the output is the engine's, and a client that leaves frees its blocks. Crashes and
hangs are covered by test_lifecycle.py.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from smelt.errors import RequestError, SmeltError
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.worker.client import EngineClient, TokenEvent, TokenStream, WorkerDiedError
from smelt.serve.worker.loop import EngineWorker
from smelt.serve.worker.messages import (
    AbortSample,
    Channel,
    SampledToken,
    StartEngine,
    StepOutput,
    SubmitRequest,
    WorkerMessage,
    pipe_pair,
)
from tests.serve.server_process import PATIENCE, language_model

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
PROMPTS = [[5, 9, 77, 30], [101] * 40, [3]]


async def collect(stream: TokenStream) -> list[TokenEvent]:
    events = []
    try:
        while result := await stream.next():
            events += result
    finally:
        stream.close()
    return events


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def answers(client: EngineClient) -> None:
    engine = Engine(Model(language_model()), kv_cache_bytes=10**7)
    requests = [engine.submit(prompt, GREEDY)[0] for prompt in PROMPTS]
    while engine.busy:
        engine.step()
    events = await collect(client.stream(PROMPTS, GREEDY))
    for index, request in enumerate(requests):
        own_events = [event for event in events if event.answer == index]
        assert [event.token for event in own_events] == request.output
        assert [event.reason for event in own_events] == [""] * 11 + ["length"]
        assert all(0 < event.started <= time.monotonic() for event in own_events)
    assert client.state["blocks_used"] == 0 and client.silent_seconds == 0


async def samples(client: EngineClient) -> None:
    """Abort one of several samples early: none of its tokens arrives after that; the others continue."""
    stream = client.stream([PROMPTS[0]], SamplingParams(max_tokens=1500, n=3, seed=1, ignore_eos=True))
    counts, at_abort = [0, 0, 0], 0
    try:
        while result := await stream.next():
            for event in result:
                counts[event.answer] += event.token is not None
            if counts[1] >= 5 and not at_abort:
                stream.abort(1)
                at_abort = counts[1]
    finally:
        stream.close()
    assert counts == [1500, at_abort, 1500]
    await until(lambda: client.state["blocks_used"] == 0)


async def leaving(client: EngineClient) -> None:
    stream = client.stream([[7] * 30] * 4, LONG)
    await stream.next()
    await until(lambda: client.state["running"] == 4)
    stream.close()
    await until(lambda: client.state["running"] == 0 and client.state["blocks_used"] == 0)
    assert client.silent_seconds == 0


async def refusal(client: EngineClient) -> None:
    with pytest.raises(RequestError, match="no token 999"):
        await collect(client.stream([PROMPTS[0], [999]], LONG))
    await until(lambda: client.state["blocks_used"] == 0)
    assert not client._streams


async def waiting(client: EngineClient) -> None:
    """Nothing arrives for a while, then an error for every client."""
    stream = client.stream([PROMPTS[0]], LONG)
    assert await stream.next(0) == []
    client.fail(SmeltError("enough"))
    with pytest.raises(SmeltError, match="enough"):
        await collect(stream)
    await until(lambda: client.state["blocks_used"] == 0)


def test_a_process_and_its_client(model_folder: Path) -> None:
    """One process for all of these, since starting one takes seconds; it exits on request."""
    parts: list[Callable[[EngineClient], Awaitable[None]]] = [answers, samples, leaving, refusal, waiting]

    async def main() -> None:
        client = EngineClient(str(model_folder), kv_cache_bytes=10**7)
        await client.start()
        for part in parts:
            await part(client)
        await client.stop(PATIENCE)
        assert client.process is not None and client.process.returncode == 0, "it was not killed"
        await until(client.lost.is_set)
        with pytest.raises(WorkerDiedError):
            client.stream(PROMPTS, GREEDY)

    asyncio.run(main())


class ScriptedChannel:
    """The worker's end of a connection: each message arrives after so many steps; it closes when all have ended."""

    def __init__(self, messages: dict[int, WorkerMessage]) -> None:
        self.messages, self.num_steps = messages, 0
        self.tokens: list[SampledToken] = []
        self.closed = False
        self._socket, self._other = socket.socketpair()
        self._other.send(b"x")  # it can be read when there is something to receive

    def fileno(self) -> int:
        return self._socket.fileno()

    def wait(self) -> WorkerMessage:
        return self.messages.pop(0)

    def receive(self) -> list[WorkerMessage]:
        self.closed = not self._socket.recv(1)
        message = None if self.closed else self.messages.pop(self.num_steps)
        if isinstance(message, AbortSample):
            self.counts_at_abort = self.counts()
        return [] if message is None else [message]

    def flush(self) -> bool:
        return True

    def counts(self) -> list[int]:
        """Return how many tokens each of three samples has."""
        return [sum(token.sample == sample for token in self.tokens) for sample in range(3)]

    def send(self, message: WorkerMessage) -> None:
        if isinstance(message, StepOutput) and message.tokens:
            self.num_steps += 1
            self.tokens += message.tokens
            if self.num_steps in self.messages:
                self._other.send(b"x")
            if sum(bool(token.reason) for token in self.tokens) == 2:
                self._other.close()


def test_an_aborted_sample_is_computed_no_further(model_folder: Path) -> None:
    sampling = asdict(SamplingParams(max_tokens=40, n=3, seed=1, ignore_eos=True))
    pipe = ScriptedChannel({0: StartEngine(str(model_folder), {"kv_cache_bytes": 10**7})})
    worker = EngineWorker(pipe)  # type: ignore[arg-type]
    pipe.messages = {0: SubmitRequest("x", PROMPTS[0], sampling), 7: AbortSample("x", 1)}
    with pytest.raises(EOFError):
        worker.run()
    assert 5 <= pipe.counts_at_abort[1] <= 7 and pipe.counts() == [40, pipe.counts_at_abort[1], 40]
    assert worker.engine.state()["blocks_used"] == 0


def test_the_engine_receives_the_model_by_name(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its folder: a bundled model's folder holds floats, its name means quantized weights."""
    monkeypatch.setenv("HOME", str(model_folder.parent))
    ours, theirs = pipe_pair()
    ours.send(StartEngine(f"~/{model_folder.name}", {"kv_cache_bytes": 10**6}))
    loop = EngineWorker(Channel(theirs))
    assert loop.engine.model.source == f"~/{model_folder.name}" and loop.folder == str(model_folder)
