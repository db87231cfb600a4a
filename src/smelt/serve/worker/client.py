"""The server's side of the engine's process: start it, submit requests, read their events, see whether it lives.

A thread reads the pipe and hands everything to the event loop; nothing here waits for the engine.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

from smelt.errors import RequestError, SmeltError
from smelt.serve.engine.sampling import Sampling
from smelt.serve.worker.pipe import Message, Pipe, pipe_pair


class WorkerDied(SmeltError):
    """The engine's process is gone; requests that were under way are lost."""


@dataclass(frozen=True)
class TokenEvent:
    """A token of one sample of a request, or its end, or both."""

    sample: int
    token: int | None
    logprobs: tuple[float, list[tuple[int, float]]] | None
    reason: str
    cached: int


@dataclass
class _Waiting:
    """A request whose events are coming."""

    samples: int
    queue: asyncio.Queue[TokenEvent | Exception] = field(default_factory=asyncio.Queue)


class EngineClient:
    """One engine process. Made and used on one event loop."""

    def __init__(self, source: str, **options: Any) -> None:
        self.source, self.options = source, options
        self.facts: Message = {}
        self.state: dict[str, float] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._names = 0
        self._ready: asyncio.Future[None] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None and bool(self.facts)

    async def start(self) -> None:
        """Start the process and wait until its model is loaded."""
        loop = asyncio.get_running_loop()
        self.facts, self._ready = {}, loop.create_future()
        self._pipe, theirs = pipe_pair()
        command = [sys.executable, "-m", "smelt.serve.worker.loop", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ})
        self._pipe.send({"model": self.source, **self.options})
        threading.Thread(target=self._read, args=(loop, self._pipe), daemon=True).start()
        await self._ready

    async def stream(
        self, prompt: list[int], sampling: Sampling, *, priority: int = 0, salt: bytes = b""
    ) -> AsyncIterator[TokenEvent]:
        """The events of a request. Leaving the loop early, or being cancelled, aborts it."""
        if not self.alive or self._pipe is None:
            raise WorkerDied("the engine is not running.")
        self._names += 1
        name = str(self._names)
        waiting = self._waiting[name] = _Waiting(sampling.n)
        self._pipe.send({
            "kind": "submit", "name": name, "prompt": prompt, "sampling": asdict(sampling), "priority": priority,
            "salt": salt.hex(),
        })  # fmt: skip
        left = sampling.n
        try:
            while left:
                event = await waiting.queue.get()
                if isinstance(event, Exception):
                    left = 0
                    raise event
                left -= bool(event.reason)
                yield event
        finally:
            self._waiting.pop(name, None)
            if left and self.alive:
                self._pipe.send({"kind": "abort", "name": name})

    async def stop(self, seconds: float = 5.0) -> None:
        """Close the pipe, at which the process ends; one that does not is killed."""
        if self._pipe is not None:
            self._pipe.close()
        if self.process is None:
            return
        for _ in range(int(seconds * 20)):
            if self.process.poll() is not None:
                return
            await asyncio.sleep(0.05)
        self.process.kill()
        self.process.wait()

    def _read(self, loop: asyncio.AbstractEventLoop, pipe: Pipe) -> None:
        try:
            while True:
                message = pipe.receive()
                loop.call_soon_threadsafe(self._take, message)
        except (EOFError, OSError):
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._lost)

    def _take(self, message: Message) -> None:
        kind = message.pop("kind")
        self.state = message.pop("state", self.state)
        if kind == "ready":
            self.facts = message
            self._settle(None)
        elif kind == "failed":
            self._settle(SmeltError(message["sentence"]))
        elif kind == "refused":
            self._give(message["name"], RequestError(message["sentence"]))
        elif kind == "events":
            for request, token, logprobs, reason, cached in message["events"]:
                name, _, sample = request.rpartition("-")
                told = None if logprobs is None else (logprobs[0], [(pair[0], pair[1]) for pair in logprobs[1]])
                self._give(name, TokenEvent(int(sample), token, told, reason, cached))

    def _give(self, name: str, event: TokenEvent | Exception) -> None:
        if name in self._waiting:
            self._waiting[name].queue.put_nowait(event)

    def _lost(self) -> None:
        """The process has gone: nobody waits any longer."""
        self.facts = {}
        self._settle(SmeltError("the engine's process ended while it was starting."))
        for name in list(self._waiting):
            self._give(name, WorkerDied("the engine's process ended."))

    def _settle(self, error: Exception | None) -> None:
        if self._ready is None or self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)
