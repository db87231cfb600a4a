"""The server's side of the engine's process: start it, submit requests, read their events, see whether it lives.

One thread reads the pipe and hands everything to the event loop, another writes to it; nothing here waits for the
engine, not even for one that has stopped reading.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

from smelt.errors import RequestError, SmeltError
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.worker.pipe import Message, Pipe, pipe_pair
from smelt.subprocesses import python_command, python_environment

Observer = Callable[[dict[str, int]], None]


class WorkerDiedError(SmeltError):
    """The engine's process is gone; requests that were under way are lost."""


class OtherModelError(SmeltError):
    """The model is no language model."""

    def __init__(self, folder: str, task: str) -> None:
        super().__init__(f"{folder} is no language model but one for {task}: it cannot generate.")
        self.folder, self.task = folder, task


@dataclass(frozen=True)
class TokenEvent:
    """A token of one answer, or its end, or both. Answers are counted prompt by prompt, sample by sample."""

    answer: int
    token: int | None
    logprobs: tuple[float, list[tuple[int, float]]] | None
    reason: str
    cached: int  # tokens of the prompt that were in the prefix cache
    started: float  # when the engine first computed some of it, by time.monotonic()


class Stream:
    """The events of the answers to some prompts, as they come. Close it: what is left is aborted in the engine."""

    def __init__(self, client: EngineClient, names: list[str], samples: int) -> None:
        self._client, self._names, self._samples = client, names, samples
        self._open = set(range(len(names) * samples))
        self._queue: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()

    async def next(self, seconds: float | None = None) -> list[TokenEvent]:
        """All that came since; nothing when all answers have ended, or nothing came for so many seconds."""
        found: list[TokenEvent] = []
        while self._open and (not found or not self._queue.empty()):
            if self._queue.empty():
                try:
                    async with asyncio.timeout(seconds):
                        event = await self._queue.get()
                except TimeoutError:
                    break
            else:
                event = self._queue.get_nowait()
            if isinstance(event, Exception):
                self._open.clear() if isinstance(event, WorkerDiedError) else self.close()
                raise event
            if event.answer in self._open:
                found.append(event)
                if event.reason:
                    self._open.discard(event.answer)
        return found

    def end(self, answer: int) -> None:
        """No more of this answer is wanted."""
        if answer in self._open:
            self._open.discard(answer)
            self._client.abort(self._names[answer // self._samples], answer % self._samples)

    def close(self) -> None:
        for answer in list(self._open):
            self.end(answer)
        self._client.forget(self._names)

    def give(self, event: TokenEvent | Exception) -> None:
        self._queue.put_nowait(event)


class EngineClient:
    """One engine process. Made and used on one event loop. `observe` is told every state that the engine sends."""

    command = tuple(python_command("-m", "smelt.serve.worker.loop"))  # followed by the number of its end of the pipe

    def __init__(self, source: str, *, observe: Observer | None = None, **options: Any) -> None:
        self.source, self.options, self._observe = source, options, observe
        self.facts: Message = {}
        self.state: dict[str, int] = {}
        self.replicas: dict[str, Message] = {}  # where there are several engines: what is known of each, by its name
        self.process: subprocess.Popen[bytes] | None = None
        self.lost = asyncio.Event()  # the process that was started is gone
        self._pipe: Pipe | None = None
        self._outgoing: SimpleQueue[Message | None] = SimpleQueue()
        self._streams: dict[str, tuple[Stream, int]] = {}  # by name: the stream and the place of its prompt
        self._names = 0
        self._moved = 0.0
        self._ready: asyncio.Future[None] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None and bool(self.facts)

    @property
    def silent_seconds(self) -> float:
        """How long requests have been waiting without any step being finished."""
        return time.monotonic() - self._moved if self._streams else 0.0

    async def start(self) -> None:
        """Start the process and wait until its model is loaded."""
        loop = asyncio.get_running_loop()
        self.facts, self._ready, self._outgoing = {}, loop.create_future(), SimpleQueue()
        self.lost.clear()
        self._pipe, theirs = pipe_pair()
        with theirs:
            command = [*self.command, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=python_environment())
        self._outgoing.put({"model": self.source, **self.options})
        threading.Thread(target=self._read, args=(loop, self._pipe), daemon=True).start()
        threading.Thread(target=_write, args=(self._pipe, self._outgoing), daemon=True).start()
        await self._ready

    def stream(
        self, prompts: Sequence[list[int]], sampling: SamplingParams, *, priority: int = 0, salt: bytes = b"",
        adapter: str | None = None,
    ) -> Stream:  # fmt: skip
        """Submit prompts: their answers' events."""
        if not self.alive:
            raise WorkerDiedError("the engine is not running.")
        if not self._streams:
            self._moved = time.monotonic()
        names = [str(self._names + place) for place in range(len(prompts))]
        self._names += len(prompts)
        stream = Stream(self, names, sampling.n)
        for place, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            self._streams[name] = (stream, place * sampling.n)
            self._send({
                "kind": "submit", "name": name, "prompt": prompt, "sampling": asdict(sampling), "priority": priority,
                "salt": salt.hex(), "adapter": adapter,
            })  # fmt: skip
        return stream

    def abort(self, name: str, sample: int) -> None:
        if self.alive:
            self._send({"kind": "abort", "name": name, "sample": sample})

    def forget(self, names: Sequence[str]) -> None:
        """Nobody reads what still comes for these."""
        for name in names:
            self._streams.pop(name, None)

    def fail(self, error: Exception) -> None:
        """End every request with this error."""
        for stream, _ in list(self._streams.values()):
            stream.give(error)

    async def stop(self, seconds: float = 5.0) -> None:
        """Close the pipe, at which the process ends; one that does not is killed."""
        self._outgoing.put(None)
        if self._pipe is not None:
            self._pipe.close()
        if self.process is None:
            return
        for _ in range(int(seconds * 20)):
            if self.process.poll() is not None:
                return
            await asyncio.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """End the process at once; whoever waits for it is told."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _send(self, message: Message) -> None:
        self._outgoing.put(message)

    def _read(self, loop: asyncio.AbstractEventLoop, pipe: Pipe) -> None:
        try:
            while True:
                _call(loop, self._take, pipe, pipe.receive())
        except (EOFError, OSError):
            _call(loop, self._lost, pipe)

    def _take(self, pipe: Pipe, message: Message) -> None:
        if pipe is not self._pipe:  # from a process that was replaced
            return
        kind = message.pop("kind")
        if "state" in message:
            self.state, self._moved = message.pop("state"), time.monotonic()
            if self._observe is not None:
                self._observe(self.state)
        if kind == "ready":
            self.facts = message
            self._settle(None)
        elif kind == "other":
            self._settle(OtherModelError(message["folder"], message["task"]))
        elif kind == "failed":
            self._settle(SmeltError(message["sentence"]))
        elif kind == "refused":
            self._give(message["name"], RequestError(message["sentence"]))
        elif kind == "events":
            for name, sample, token, logprobs, reason, cached, started in message["events"]:
                if name in self._streams:
                    answer = self._streams[name][1] + sample
                    told = None if logprobs is None else (logprobs[0], [(pair[0], pair[1]) for pair in logprobs[1]])
                    self._give(name, TokenEvent(answer, token, told, reason, cached, started))

    def _give(self, name: str, event: TokenEvent | Exception) -> None:
        if name in self._streams:
            self._streams[name][0].give(event)

    def _lost(self, pipe: Pipe) -> None:
        """The process has gone: nobody waits any longer."""
        if pipe is not self._pipe:
            return
        self.facts = {}
        self.state = {**self.state, "running": 0, "waiting": 0, "blocks_used": 0}
        self._settle(SmeltError("the engine's process ended while it was starting."))
        self.fail(WorkerDiedError("the engine's process ended; the request is lost, send it again."))
        self._streams.clear()
        self.lost.set()

    def _settle(self, error: Exception | None) -> None:
        if self._ready is None or self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)


def _write(pipe: Pipe, outgoing: SimpleQueue[Message | None]) -> None:
    try:
        while (message := outgoing.get()) is not None:
            pipe.send(message)
    except OSError:  # the process is gone, which the reader sees too
        return


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """From a thread; a loop that was closed meanwhile needs nothing more."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return
