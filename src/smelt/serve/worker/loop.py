"""The process that runs the engine: receive requests, run steps, send what each step sampled.

    python -m smelt.serve.worker.loop DESCRIPTOR      (started by `smelt.serve.worker.client`)

It ends when its server closes the connection, so that no engine outlives it. More clients may connect to a Unix socket:
the processes of a server with several. Grammars are compiled in a thread, beside steps.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from smelt.errors import SmeltError
from smelt.logs import show_logs
from smelt.serve.priorities import yield_to_others
from smelt.serve.worker.messages import (
    AbortSample,
    AdapterChanged,
    Channel,
    EngineReady,
    Heartbeat,
    LoadAdapter,
    NotALanguageModel,
    RequestAccepted,
    RequestRejected,
    SampledToken,
    StartEngine,
    StartFailed,
    StepOutput,
    SubmitRequest,
    UnloadAdapter,
    WorkerMessage,
)

if TYPE_CHECKING:
    from smelt.serve.engine.engine import Event
    from smelt.serve.engine.request import Request
    from smelt.serve.engine.step_timer import StepTimer

HEARTBEAT_SECONDS = 0.5
MAX_COMPILING = 64  # requests whose grammars wait to be compiled
FLUSH_SECONDS = 0.01  # between two attempts to send to a client that reads slowly
COMPILE_POLL_SECONDS = 0.002  # how often an idle engine looks whether one is ready


class HeartbeatThread(threading.Thread):
    """Tell the clients that this process is scheduled, and how long its current step has run.

    A heartbeat does not prove that a step advances: the step's time and limit in it let the server judge that. A
    process whose server has gone ends here even if its step hangs.
    """

    def __init__(self, server: Channel) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._server, self._stopped = server, threading.Event()
        self.channels: list[Channel] = [server]  # replaced, never changed, by the engine's thread
        self.step_timer: StepTimer | None = None  # when the engine is loaded

    def run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            timer = self.step_timer
            for channel in self.channels:
                channel.send(Heartbeat() if timer is None else Heartbeat(timer.seconds, timer.limit))
            if self._server.closed and not self._stopped.is_set():
                os._exit(0)

    def stop(self) -> None:
        self._stopped.set()


class EngineWorker:
    """One engine and its clients: the server that started it, and those that connect to its socket."""

    def __init__(self, server: Channel, heartbeat: HeartbeatThread | None = None) -> None:
        from smelt.models.load import resolve, skeleton
        from smelt.models.model import Model
        from smelt.progress import progress_bars
        from smelt.serve.engine.engine import Engine

        start = server.wait()
        assert isinstance(start, StartEngine)
        self.server, self.folder = server, str(resolve(start.model))
        task = Model(skeleton(self.folder)).task
        if task != "language":
            server.send(NotALanguageModel(self.folder, task))
            raise EOFError
        # By name, not by folder: a bundled model's name also says in which format it is served.
        with progress_bars() as progress:
            for name in progress.track([start.model], "loading the model"):
                self.engine = Engine(name, **start.options)
            self.engine.warmup(progress=progress)
        self._samples: dict[tuple[Channel, str], list[Request | None]] = {}  # by request; None: it has finished
        self._ids: dict[Request, tuple[Channel, str, int]] = {}
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars", initializer=yield_to_others)
        self._compiling: deque[tuple[Channel, SubmitRequest, Future[object]]] = deque()  # in the order of arrival
        self._heartbeat = heartbeat or HeartbeatThread(server)
        self._heartbeat.step_timer = self.engine.step_timer
        self._channels: list[Channel] = []
        self._selector = selectors.DefaultSelector()
        if start.listen:
            self._selector.register(_listen(start.listen), selectors.EVENT_READ)
        self._add_client(server)
        self._compiler.submit(self.engine.grammar_compiler.prepare)

    def run(self) -> None:
        """Serve until the server closes its connection; then raise EOFError."""
        gc.freeze()  # else a full collection would go over everything that was imported, in the middle of a step
        while True:
            self._receive()
            self._submit_compiled()
            if not self.engine.busy:
                continue
            computed = self.engine.state()["computed_tokens"]
            events = self.engine.step()
            state = self.engine.state()
            if events or state["computed_tokens"] != computed:  # a step that did nothing is no sign of life
                self._send_tokens(events, state)
            for event in events:
                if event.request.error and event.request in self._ids:
                    channel, request_id, _ = self._ids[event.request]
                    channel.send(RequestRejected(request_id, event.request.error))
                if event.reason:
                    self._remove(event.request)

    def _receive(self) -> None:
        """Handle what clients have sent; wait for it if there is nothing else to do."""
        while ready := self._selector.select(self._idle_seconds()):
            for key, _ in ready:
                if key.data is None:
                    assert isinstance(key.fileobj, socket.socket)
                    self._add_client(Channel(key.fileobj.accept()[0]))
                    continue
                for message in key.data.receive():
                    self.handle(key.data, message)
            self._remove_lost_clients()
        self._remove_lost_clients()

    def _remove_lost_clients(self) -> None:
        for channel in self._channels:
            if channel.closed:
                self._remove_client(channel)

    def _idle_seconds(self) -> float | None:
        """Return how long to wait for a message before the next step."""
        flushed = [channel.flush() for channel in self._channels]
        if self.engine.busy:
            return 0.0
        if not all(flushed):
            return FLUSH_SECONDS
        return COMPILE_POLL_SECONDS if self._compiling else None

    def _add_client(self, channel: Channel) -> None:
        self._selector.register(channel, selectors.EVENT_READ, channel)
        self._set_channels([*self._channels, channel])
        channel.send(self._ready())

    def _remove_client(self, channel: Channel) -> None:
        """Abort the requests of a client that has gone; without the server, end."""
        if channel is self.server:
            raise EOFError
        self._selector.unregister(channel)
        self._set_channels([other for other in self._channels if other is not channel])
        for owner, request_id in list(self._samples):
            if owner is channel:
                for request in filter(None, self._samples[owner, request_id][:]):
                    self.engine.abort(request)
                    self._remove(request)
        for owner, message, _ in list(self._compiling):
            if owner is channel:
                self._stop_compiling(channel, message.request_id)
        channel.close()
        self._send_tokens([], self.engine.state())

    def _set_channels(self, channels: list[Channel]) -> None:
        self._channels = self._heartbeat.channels = channels

    def _send_tokens(self, events: Sequence[Event], state: dict[str, int]) -> None:
        """Send each client the tokens of its requests, and the state to all: also when requests end by an abort, since
        an idle engine would never correct what they know."""
        tokens: dict[Channel, list[SampledToken]] = {channel: [] for channel in self._channels}
        for event in events:
            if event.request in self._ids and not event.request.error:
                channel, request_id, sample = self._ids[event.request]
                tokens[channel].append(_sampled_token(request_id, sample, event))
        for channel, sampled in tokens.items():
            channel.send(StepOutput(state, sampled))

    def handle(self, channel: Channel, message: WorkerMessage) -> None:
        if isinstance(message, SubmitRequest):
            if not self._compiles(channel, message):
                self._submit(channel, message)
        elif isinstance(message, AbortSample):
            self._stop_compiling(channel, message.request_id)
            samples = self._samples.get((channel, message.request_id))
            request = samples[message.sample] if samples is not None else None
            if request is not None:
                self.engine.abort(request)
                self._remove(request)
            self._send_tokens([], self.engine.state())
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            self._change_adapter(channel, message)

    def _change_adapter(self, channel: Channel, message: LoadAdapter | UnloadAdapter) -> None:
        try:
            if isinstance(message, LoadAdapter):
                self.engine.load_adapter(message.name, message.folder)
            else:
                self.engine.unload_adapter(message.name)
        except SmeltError as error:
            channel.send(AdapterChanged(str(error)))
        else:
            channel.send(AdapterChanged())

    def _compiles(self, channel: Channel, message: SubmitRequest) -> bool:
        """Have the grammar of a request compiled first, unless it has none or is known; or refuse the request."""
        from smelt.serve.engine.sampling_params import SamplingParams

        compiler, constraint = (
            self.engine.grammar_compiler,
            SamplingParams.from_json(message.sampling).structured_output,
        )
        if constraint is None or compiler.cached_matcher(constraint) is not None:
            return False
        if len(self._compiling) >= MAX_COMPILING:
            sentence = "too many structured outputs wait to be compiled; try again later."
            channel.send(RequestRejected(message.request_id, sentence, overloaded=True))
        else:
            self._compiling.append((channel, message, self._compiler.submit(compiler.matcher, constraint)))
        return True

    def _submit_compiled(self) -> None:
        """Queue the requests whose grammars are ready, in the order of arrival."""
        while self._compiling and self._compiling[0][2].done():
            channel, message, compilation = self._compiling.popleft()
            error = compilation.exception()
            if isinstance(error, SmeltError):
                channel.send(RequestRejected(message.request_id, str(error)))
            elif error is not None:
                raise error
            else:
                self._submit(channel, message)

    def _stop_compiling(self, channel: Channel, request_id: str) -> None:
        for entry in list(self._compiling):
            owner, message, compilation = entry
            if owner is channel and message.request_id == request_id:
                compilation.cancel()
                self._compiling.remove(entry)

    def _submit(self, channel: Channel, message: SubmitRequest) -> None:
        from smelt.serve.engine.request import Tenant
        from smelt.serve.engine.sampling_params import SamplingParams

        sampling = SamplingParams.from_json(message.sampling)
        try:
            requests = self.engine.submit(
                message.prompt,
                sampling,
                name=message.request_id,
                priority=message.priority,
                salt=bytes.fromhex(message.salt),
                adapter=message.adapter,
                tenant=Tenant(message.tenant, message.weight),
            )
        except SmeltError as error:
            channel.send(RequestRejected(message.request_id, str(error)))
            return
        if sampling.structured_output is not None:
            channel.send(RequestAccepted(message.request_id))
        self._samples[channel, message.request_id] = [*requests]
        self._ids.update({request: (channel, message.request_id, sample) for sample, request in enumerate(requests)})

    def _remove(self, request: Request) -> None:
        if request not in self._ids:
            return
        channel, request_id, sample = self._ids.pop(request)
        samples = self._samples[channel, request_id]
        samples[sample] = None
        if not any(samples):
            del self._samples[channel, request_id]

    def _ready(self) -> EngineReady:
        engine = self.engine
        return EngineReady(
            folder=self.folder,
            max_model_len=engine.max_model_len,
            max_request_tokens=engine.max_request_tokens,
            vocab_size=engine.vocab_size,
            backend=engine.backend,
            blocks=engine.pool.num_blocks,
            block_size=engine.pool.block_size,
            state=engine.state(),
            eos_token_ids=list(engine.runner.eos_token_ids),
            pid=os.getpid(),
        )


def _sampled_token(request_id: str, sample: int, event: Event) -> SampledToken:
    request = event.request
    logprobs = None if event.logprobs is None else (event.logprobs.own, event.logprobs.top)
    started = round(request.started, 6)
    return SampledToken(
        request_id, sample, event.token, logprobs, event.reason, request.num_cached_tokens, started,
        [(logprob.own, logprob.rank, logprob.top) for logprob in event.prompt_logprobs] or None,
    )  # fmt: skip


def _listen(path: str) -> socket.socket:
    """Listen on a Unix socket in place of that of an earlier process; its folder decides who may connect."""
    with suppress(FileNotFoundError):
        Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    return listener


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the process group: the server decides when to stop
        signal.signal(number, signal.SIG_IGN)
    show_logs(prefix="smelt: ")
    server = Channel(socket.socket(fileno=int(sys.argv[1])))
    heartbeat = HeartbeatThread(server)
    heartbeat.start()
    try:
        EngineWorker(server, heartbeat).run()
    except EOFError:
        os._exit(0)  # the interpreter's own shutdown takes seconds
    except SmeltError as error:
        server.send(StartFailed(str(error)))
        sys.exit(2)
    finally:
        heartbeat.stop()


if __name__ == "__main__":
    main()
