"""The process that runs the engine: receive requests, run steps, send what each step sampled.

    python -m smelt.serve.worker.loop DESCRIPTOR      (started by `smelt.serve.worker.client`)

It ends when the pipe is closed, so that no engine outlives its server.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from smelt.errors import SmeltError
from smelt.logs import show_logs
from smelt.serve.worker.messages import (
    AbortSample,
    EngineReady,
    NotALanguageModel,
    Pipe,
    RequestRejected,
    SampledToken,
    StartEngine,
    StartFailed,
    StepOutput,
    SubmitRequest,
    WorkerMessage,
)

if TYPE_CHECKING:
    from smelt.serve.engine.engine import Event
    from smelt.serve.engine.request import Request


class EngineWorker:
    """One engine and its pipe."""

    def __init__(self, pipe: Pipe) -> None:
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
        pipe.send(self._ready())

    def run(self) -> None:
        while True:
            while self.pipe.poll(0.0 if self.engine.busy else None):
                self.handle(self.pipe.receive())
            computed = self.engine.state()["computed_tokens"]
            events = self.engine.step()
            state = self.engine.state()
            if events or state["computed_tokens"] != computed:  # a step that did nothing is no sign of life
                self.pipe.send(
                    StepOutput(state, [self._token(event) for event in events if event.request in self._ids])
                )
            for event in events:
                if event.reason:
                    self._remove(event.request)

    def handle(self, message: WorkerMessage) -> None:
        if isinstance(message, SubmitRequest):
            self._submit(message)
        elif isinstance(message, AbortSample):
            samples = self._samples.get(message.request_id)
            request = samples[message.sample] if samples is not None else None
            if request is not None:
                self.engine.abort(request)
                self._remove(request)
            self.pipe.send(StepOutput(self.engine.state()))

    def _submit(self, message: SubmitRequest) -> None:
        from smelt.serve.engine.sampling_params import SamplingParams

        try:
            requests = self.engine.submit(
                message.prompt,
                SamplingParams.from_json(message.sampling),
                name=message.request_id,
                priority=message.priority,
                salt=bytes.fromhex(message.salt),
                adapter=message.adapter,
            )
        except SmeltError as error:
            self.pipe.send(RequestRejected(message.request_id, str(error)))
            return
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
            *self._ids[request], event.token, logprobs, event.reason, request.num_cached_tokens, started
        )

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
        )


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the process group: the server decides when to stop
        signal.signal(number, signal.SIG_IGN)
    show_logs(prefix="smelt: ")
    pipe = Pipe(int(sys.argv[1]))
    try:
        EngineWorker(pipe).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the interpreter's own shutdown takes seconds
    except SmeltError as error:
        pipe.send(StartFailed(str(error)))
        sys.exit(2)


if __name__ == "__main__":
    main()
