"""The process that runs the engine: receive requests, run steps, send what each step sampled.

    python -m smelt.serve.worker.loop DESCRIPTOR      (started by `smelt.serve.worker.client`)

It ends when the pipe is closed, so that no engine outlives its server. Grammars are compiled in a thread, beside steps.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from smelt.errors import SmeltError
from smelt.logs import show_logs
from smelt.serve.priorities import yield_to_others
from smelt.serve.worker.messages import (
    AbortSample,
    AdapterChanged,
    EngineReady,
    Heartbeat,
    LoadAdapter,
    NotALanguageModel,
    Pipe,
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
COMPILE_POLL_SECONDS = 0.002  # how often an idle engine looks whether one is ready


class HeartbeatThread(threading.Thread):
    """Tell the server that this process is scheduled, and how long its current step has run.

    A heartbeat does not prove that a step advances: the step's time and limit in it let the server judge that. A
    process whose server has gone ends here even if its step hangs.
    """

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._pipe, self._stopped = pipe, threading.Event()
        self.step_timer: StepTimer | None = None  # when the engine is loaded

    def run(self) -> None:
        try:
            while not self._stopped.wait(HEARTBEAT_SECONDS):
                timer = self.step_timer
                self._pipe.send(Heartbeat() if timer is None else Heartbeat(timer.seconds, timer.limit))
        except OSError:
            if not self._stopped.is_set():
                os._exit(0)

    def stop(self) -> None:
        self._stopped.set()


class EngineWorker:
    """One engine and its pipe."""

    def __init__(self, pipe: Pipe, heartbeat: HeartbeatThread | None = None) -> None:
        from smelt.models.load import resolve, skeleton
        from smelt.models.model import Model
        from smelt.progress import progress_bars
        from smelt.serve.engine.engine import Engine

        start = pipe.receive()
        assert isinstance(start, StartEngine)
        self.pipe, self.folder = pipe, str(resolve(start.model))
        task = Model(skeleton(self.folder)).task
        if task != "language":
            pipe.send(NotALanguageModel(self.folder, task))
            raise EOFError
        # By name, not by folder: a bundled model's name also says in which format it is served.
        with progress_bars() as progress:
            for name in progress.track([start.model], "loading the model"):
                self.engine = Engine(name, **start.options)
            self.engine.warmup(progress=progress)
        self._samples: dict[str, list[Request | None]] = {}  # by request id; None: this sample has finished
        self._ids: dict[Request, tuple[str, int]] = {}
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars", initializer=yield_to_others)
        self._compiling: deque[tuple[SubmitRequest, Future[object]]] = deque()  # in the order of arrival
        if heartbeat is not None:
            heartbeat.step_timer = self.engine.step_timer
        pipe.send(self._ready())
        self._compiler.submit(self.engine.grammar_compiler.prepare)

    def run(self) -> None:
        gc.freeze()  # else a full collection would go over everything that was imported, in the middle of a step
        while True:
            while self.pipe.poll(self._idle_seconds()):
                self.handle(self.pipe.receive())
            self._submit_compiled()
            if not self.engine.busy:
                continue
            computed = self.engine.state()["computed_tokens"]
            events = self.engine.step()
            state = self.engine.state()
            if events or state["computed_tokens"] != computed:  # a step that did nothing is no sign of life
                self.pipe.send(StepOutput(state, [self._token(event) for event in events if self._is_answer(event)]))
            for event in events:
                if event.request.error and event.request in self._ids:
                    self.pipe.send(RequestRejected(self._ids[event.request][0], event.request.error))
                if event.reason:
                    self._remove(event.request)

    def _idle_seconds(self) -> float | None:
        """Return how long to wait for a message before the next step."""
        if self.engine.busy:
            return 0.0
        return COMPILE_POLL_SECONDS if self._compiling else None

    def handle(self, message: WorkerMessage) -> None:
        if isinstance(message, SubmitRequest):
            if self._compiles(message):
                return
            self._submit(message)
        elif isinstance(message, AbortSample):
            self._stop_compiling(message.request_id)
            samples = self._samples.get(message.request_id)
            request = samples[message.sample] if samples is not None else None
            if request is not None:
                self.engine.abort(request)
                self._remove(request)
            self.pipe.send(StepOutput(self.engine.state()))
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            self._change_adapter(message)

    def _change_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        try:
            if isinstance(message, LoadAdapter):
                self.engine.load_adapter(message.name, message.folder)
            else:
                self.engine.unload_adapter(message.name)
        except SmeltError as error:
            self.pipe.send(AdapterChanged(str(error)))
        else:
            self.pipe.send(AdapterChanged())

    def _is_answer(self, event: Event) -> bool:
        return event.request in self._ids and not event.request.error

    def _compiles(self, message: SubmitRequest) -> bool:
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
            self.pipe.send(RequestRejected(message.request_id, sentence, overloaded=True))
        else:
            self._compiling.append((message, self._compiler.submit(compiler.matcher, constraint)))
        return True

    def _submit_compiled(self) -> None:
        """Queue the requests whose grammars are ready, in the order of arrival."""
        while self._compiling and self._compiling[0][1].done():
            message, compilation = self._compiling.popleft()
            error = compilation.exception()
            if isinstance(error, SmeltError):
                self.pipe.send(RequestRejected(message.request_id, str(error)))
            elif error is not None:
                raise error
            else:
                self._submit(message)

    def _stop_compiling(self, request_id: str) -> None:
        for message, compilation in list(self._compiling):
            if message.request_id == request_id:
                compilation.cancel()
                self._compiling.remove((message, compilation))

    def _submit(self, message: SubmitRequest) -> None:
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
            self.pipe.send(RequestRejected(message.request_id, str(error)))
            return
        if sampling.structured_output is not None:
            self.pipe.send(RequestAccepted(message.request_id))
        self._samples[message.request_id] = [*requests]
        self._ids.update({request: (message.request_id, sample) for sample, request in enumerate(requests)})

    def _remove(self, request: Request) -> None:
        request_id, sample = self._ids.pop(request, ("", 0))
        samples = self._samples.get(request_id, [])
        if samples:
            samples[sample] = None
            if not any(samples):
                del self._samples[request_id]

    def _token(self, event: Event) -> SampledToken:
        request = event.request
        logprobs = None if event.logprobs is None else (event.logprobs.own, event.logprobs.top)
        started = round(request.started, 6)
        return SampledToken(
            *self._ids[request], event.token, logprobs, event.reason, request.num_cached_tokens, started,
            [(logprob.own, logprob.rank, logprob.top) for logprob in event.prompt_logprobs] or None,
        )  # fmt: skip

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
        )


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the process group: the server decides when to stop
        signal.signal(number, signal.SIG_IGN)
    show_logs(prefix="smelt: ")
    pipe = Pipe(int(sys.argv[1]))
    heartbeat = HeartbeatThread(pipe)
    heartbeat.start()
    try:
        EngineWorker(pipe, heartbeat).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the interpreter's own shutdown takes seconds
    except SmeltError as error:
        pipe.send(StartFailed(str(error)))
        sys.exit(2)
    finally:
        heartbeat.stop()


if __name__ == "__main__":
    main()
