"""Clients of the engine's process: start it or connect to it, submit requests, stream their tokens, check its health.

One thread reads the pipe and passes messages to the event loop, another writes; the event loop never blocks on the
engine, not even on one that has stopped reading.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

from smelt.errors import RequestError, SmeltError
from smelt.progress import show_cursor
from smelt.serve.engine.request import ANYONE, Tenant
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.worker.messages import (
    AbortSample,
    AdapterChanged,
    EngineReady,
    Heartbeat,
    LoadAdapter,
    NotALanguageModel,
    Pipe,
    PromptTokenLogprobs,
    RequestAccepted,
    RequestRejected,
    StartEngine,
    StartFailed,
    StepOutput,
    SubmitRequest,
    UnloadAdapter,
    WorkerMessage,
    pipe_pair,
)
from smelt.subprocesses import python_command, python_environment

Observer = Callable[[dict[str, int]], None]
START_SILENCE = 120.0  # seconds without a sign of life while the model is loaded; importing torch can block heartbeats
CONNECT_SECONDS = 0.05  # between two attempts to connect to an engine
END_SECONDS = 10.0  # for a killed process to end before another is started


class WorkerDiedError(SmeltError):
    """The engine's process has ended; its requests are lost."""


class OverloadedError(SmeltError):
    """The engine has too much to do; the request may be sent again later."""


class OtherModelError(SmeltError):
    """The model is not a language model."""

    def __init__(self, folder: str, task: str) -> None:
        super().__init__(f"{folder} is not a language model but one for {task}: it cannot generate.")
        self.folder, self.task = folder, task


@dataclass(frozen=True)
class TokenEvent:
    """A token of one answer, or its end, or both. Answers are numbered prompt by prompt, sample by sample."""

    answer: int
    token: int | None
    logprobs: tuple[float, list[tuple[int, float]]] | None
    reason: str
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    started: float  # when the engine first computed some of it, by time.monotonic()
    prompt_logprobs: Sequence[PromptTokenLogprobs] = ()  # of the next prompt tokens, from the second on


class TokenStream:
    """The tokens of a request's answers as they arrive. `close` aborts what has not finished."""

    def __init__(self, client: EngineConnection, request_ids: list[str], samples: int) -> None:
        self._client, self._request_ids, self._samples = client, request_ids, samples
        self._open = set(range(len(request_ids) * samples))
        self._queue: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def accepted(self, timeout: float) -> None:
        """Wait until the engine has compiled the constraint of the request, and raise what it has against it.

        Raise TimeoutError if that takes longer.
        """
        async with asyncio.timeout(timeout):
            await asyncio.shield(self._accepted)

    async def next(self, timeout: float | None = None) -> list[TokenEvent]:
        """Return all new events; none if every answer has finished or the timeout has passed."""
        events: list[TokenEvent] = []
        while self._open and (not events or not self._queue.empty()):
            if self._queue.empty():
                try:
                    async with asyncio.timeout(timeout):
                        event = await self._queue.get()
                except TimeoutError:
                    break
            else:
                event = self._queue.get_nowait()
            if isinstance(event, Exception):
                self._open.clear() if isinstance(event, WorkerDiedError) else self.close()
                raise event
            if event.answer in self._open:
                events.append(event)
                if event.reason:
                    self._open.discard(event.answer)
        return events

    def abort(self, answer: int) -> None:
        if answer in self._open:
            self._open.discard(answer)
            self._client.abort(self._request_ids[answer // self._samples], answer % self._samples)

    def close(self) -> None:
        for answer in list(self._open):
            self.abort(answer)
        self._client.forget(self._request_ids)

    def push(self, event: TokenEvent | Exception) -> None:
        self.accept(event if isinstance(event, Exception) else None)
        self._queue.put_nowait(event)

    def accept(self, error: Exception | None = None) -> None:
        if self._accepted.done():
            return
        if error is None:
            self._accepted.set_result(None)
        else:
            self._accepted.set_exception(error)
            self._accepted.exception()  # perhaps nobody waits for it, which is no fault


class EngineConnection:
    """A connection to an engine, used from one event loop. `observe` is called with every state that it reports."""

    def __init__(self, observe: Observer | None = None) -> None:
        self._observe = observe
        self.engine: EngineReady | None = None  # while it runs
        self.state: dict[str, int] = {}
        self.replicas: dict[str, dict[str, Any]] = {}  # status of each engine by name, if there are several
        self.lost = asyncio.Event()  # the process has ended
        self._pipe: Pipe | None = None
        self._outgoing: SimpleQueue[WorkerMessage | None] = SimpleQueue()
        self._streams: dict[str, tuple[TokenStream, int]] = {}  # by request id: the stream, and its first answer there
        self._adapter_changes: deque[asyncio.Future[None]] = deque()  # in the order in which they were sent
        self._num_requests = 0
        self._last_step = 0.0
        self._last_message = 0.0
        self._heartbeat = Heartbeat()
        self._ready: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Connect to an engine, and wait until its model is loaded."""
        raise NotImplementedError

    async def stop(self, timeout: float = 5.0) -> None:
        """Close the connection."""
        self._outgoing.put(None)
        if self._pipe is not None:
            self._pipe.close()

    @property
    def alive(self) -> bool:
        return self.engine is not None

    @property
    def pid(self) -> int | None:
        """The engine's process."""
        return self.engine.pid if self.engine is not None else None

    @property
    def silent_seconds(self) -> float:
        """How long requests have waited without a finished step."""
        return time.monotonic() - self._last_step if self._streams else 0.0

    def hang_reason(self, step_timeout: float, heartbeat_timeout: float) -> str:
        """Return why the engine counts as hung; empty if it does not."""
        if not self.alive:
            return ""
        if time.monotonic() - self._last_message > heartbeat_timeout:
            return f"the engine's process gave no sign of life for {heartbeat_timeout:g} seconds."
        step = self._heartbeat
        limit = step_timeout if step.step_limit is None else min(step.step_limit, step_timeout)
        if step.step_seconds > limit:
            return f"a step of the engine has not ended after {limit:.1f} seconds."
        if self.silent_seconds > step_timeout:
            return f"requests wait, and no step was finished for {step_timeout:g} seconds."
        return ""

    def _open(self, pipe: Pipe, first: WorkerMessage | None = None) -> asyncio.Future[None]:
        """Read and write a new connection from now on; return a future of its engine being ready."""
        loop = asyncio.get_running_loop()
        self.engine, self._ready, self._outgoing = None, loop.create_future(), SimpleQueue()
        self._heartbeat, self._last_message, self._pipe = Heartbeat(), time.monotonic(), pipe
        self.lost.clear()
        if first is not None:
            self._outgoing.put(first)
        threading.Thread(target=self._read, args=(loop, pipe, self._outgoing), daemon=True).start()
        threading.Thread(target=_write, args=(pipe, self._outgoing), daemon=True).start()
        return self._ready

    def stream(
        self, prompts: Sequence[list[int]], sampling: SamplingParams, *, priority: int = 0, salt: bytes = b"",
        adapter: str | None = None, tenant: Tenant = ANYONE,
    ) -> TokenStream:  # fmt: skip
        """Submit prompts and stream their answers."""
        if not self.alive:
            raise WorkerDiedError("the engine is not running.")
        if not self._streams:
            self._last_step = time.monotonic()
        request_ids = [str(self._num_requests + index) for index in range(len(prompts))]
        self._num_requests += len(prompts)
        stream = TokenStream(self, request_ids, sampling.n)
        for index, (request_id, prompt) in enumerate(zip(request_ids, prompts, strict=True)):
            self._streams[request_id] = (stream, index * sampling.n)
            self._send(SubmitRequest(request_id, prompt, asdict(sampling), priority, salt.hex(), adapter, *tenant))
        return stream

    def abort(self, request_id: str, sample: int) -> None:
        if self.alive:
            self._send(AbortSample(request_id, sample))

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop whatever still arrives for these requests."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)

    def fail(self, error: Exception) -> None:
        """Fail every request with this error."""
        for stream, _ in list(self._streams.values()):
            stream.push(error)

    def _send(self, message: WorkerMessage) -> None:
        self._outgoing.put(message)

    def _read(self, loop: asyncio.AbstractEventLoop, pipe: Pipe, outgoing: SimpleQueue[WorkerMessage | None]) -> None:
        try:
            while True:
                message = pipe.receive()
                if pipe is self._pipe:  # noted here: the event loop may be late
                    self._last_message = time.monotonic()
                    if isinstance(message, Heartbeat):
                        self._heartbeat = message
                _call(loop, self._receive, pipe, message)
        except (EOFError, OSError):
            outgoing.put(None)  # ends the thread that writes, also if another process was started meanwhile
            _call(loop, self._on_lost, pipe)

    def _receive(self, pipe: Pipe, message: WorkerMessage) -> None:
        if pipe is not self._pipe:  # from a process that was replaced
            return
        if isinstance(message, StepOutput):
            self._update_state(message.state)
            for request_id, sample, *event in message.tokens:
                if request_id in self._streams:
                    self._push(request_id, token_event(self._streams[request_id][1] + sample, event))
        elif isinstance(message, EngineReady):
            self.engine = message
            self._update_state(message.state)
            self._finish_start(None)
        elif isinstance(message, AdapterChanged):
            _finish(self._adapter_changes.popleft(), SmeltError(message.error) if message.error else None)
        elif isinstance(message, RequestAccepted):
            if message.request_id in self._streams:
                self._streams[message.request_id][0].accept()
        elif isinstance(message, RequestRejected):
            error = OverloadedError(message.message) if message.overloaded else RequestError(message.message)
            self._push(message.request_id, error)
        elif isinstance(message, NotALanguageModel):
            self._finish_start(OtherModelError(message.folder, message.task))
        elif isinstance(message, StartFailed):
            self._finish_start(SmeltError(message.message))

    def _update_state(self, state: dict[str, int]) -> None:
        self.state, self._last_step = state, time.monotonic()
        if self._observe is not None:
            self._observe(state)

    def _push(self, request_id: str, event: TokenEvent | Exception) -> None:
        if request_id in self._streams:
            self._streams[request_id][0].push(event)

    def _on_lost(self, pipe: Pipe) -> None:
        """Fail everything that waits for a process that has ended."""
        if pipe is not self._pipe:
            return
        self.engine = self._pipe = None
        self.state = {**self.state, "running": 0, "waiting": 0, "blocks_used": 0, "kv_bytes_used": 0, "kv_tokens": 0}
        self._finish_start(SmeltError("the engine's process ended while it was starting."))
        self.fail(WorkerDiedError("the engine's process ended; the request is lost, send it again."))
        self._streams.clear()
        while self._adapter_changes:
            _finish(self._adapter_changes.popleft(), WorkerDiedError("the engine's process ended; try again."))
        self.lost.set()

    def _finish_start(self, error: Exception | None) -> None:
        if self._ready is not None:
            _finish(self._ready, error)


class EngineClient(EngineConnection):
    """One engine process, which this one starts."""

    command = tuple(python_command("-m", "smelt.serve.worker.loop"))  # and the descriptor of its socket

    def __init__(self, source: str, *, observe: Observer | None = None, listen: str = "", **options: Any) -> None:
        super().__init__(observe)
        self.source, self.listen, self.options = source, listen, options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return super().alive and self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    async def start(self) -> None:
        """Start the process and wait until its model is loaded."""
        if not await self._ended(END_SECONDS):
            raise SmeltError("the engine's last process was killed but does not end, so its memory is not free.")
        pipe, theirs = pipe_pair()
        with theirs:
            command = [*self.command, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=python_environment())
        ready = self._open(pipe, StartEngine(self.source, self.options, self.listen))
        while not ready.done():
            await asyncio.wait([ready], timeout=1.0)
            if time.monotonic() - self._last_message > START_SILENCE:
                self.kill()
        await ready

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter; a process that is started later has it too."""
        await self._change_adapter(LoadAdapter(name, folder))
        self.options["adapters"] = {**self.options.get("adapters", {}), name: folder}

    async def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter; raise SmeltError if requests are using it."""
        await self._change_adapter(UnloadAdapter(name))
        self.options["adapters"] = {key: folder for key, folder in self.options["adapters"].items() if key != name}

    async def _change_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        if not self.alive:
            raise WorkerDiedError("the engine is not running.")
        self._adapter_changes.append(asyncio.get_running_loop().create_future())
        self._send(message)
        await self._adapter_changes[-1]

    async def stop(self, timeout: float = 5.0) -> None:
        """Close the connection, which ends the process; kill it if it does not end in time."""
        await super().stop()
        if not await self._ended(timeout):
            self.kill()
            await self._ended(END_SECONDS)

    async def _ended(self, timeout: float) -> bool:
        """Wait for the process to end; return whether there is none any more."""
        deadline = time.monotonic() + timeout
        while self.process is not None and self.process.poll() is None:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def kill(self) -> None:
        """Kill the process; requests that wait for it fail at once, also if the kernel cannot end it now."""
        if self.process is not None:
            self.process.kill()
            show_cursor()  # its progress bars may have hidden it
        if self._pipe is not None:
            self._pipe.close()
            self._on_lost(self._pipe)


class AttachedEngine(EngineConnection):
    """An engine that another process has started and supervises, and that listens on a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    async def start(self) -> None:
        """Connect as soon as the engine listens, however long that takes."""
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self.path)
                break
            except OSError:
                connection.close()
                await asyncio.sleep(CONNECT_SECONDS)
        await self._open(Pipe(connection))


def _finish(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def token_event(answer: int, fields: Sequence[Any]) -> TokenEvent:
    """Build an event from those fields of a `SampledToken` that follow its sample; JSON has made tuples lists."""
    token, logprobs, reason, cached, started, prompt_logprobs = fields
    own = None if logprobs is None else (logprobs[0], [(token, logprob) for token, logprob in logprobs[1]])
    of_prompt = [(own, rank, [(token, logprob) for token, logprob in top]) for own, rank, top in prompt_logprobs or ()]
    return TokenEvent(answer, token, own, reason, cached, started, of_prompt)


def _write(pipe: Pipe, outgoing: SimpleQueue[WorkerMessage | None]) -> None:
    try:
        while (message := outgoing.get()) is not None:
            pipe.send(message)
    except OSError:  # the process has ended, which the reader notices too
        return


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call from another thread; ignore a loop that was closed meanwhile."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return
