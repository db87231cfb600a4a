"""An engine in a thread of its own: an event loop submits requests and streams their text."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from smelt.errors import ModelError, RequestError
from smelt.serve.engine.detokenizer import Detokenizer, TextDelta
from smelt.serve.engine.engine import Engine, Event
from smelt.serve.engine.request import Request
from smelt.serve.engine.sampling_params import SamplingParams


class AsyncEngine:
    """An engine in a thread: `async for delta in engine.stream("Once", SamplingParams(max_tokens=64))`. Close it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[Request, Callable[[Event], None]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join()

    async def stream(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncIterator[TextDelta]:
        """Yield the text of all samples as it is generated. Leaving early releases the request's blocks."""
        tokenizer, sampling = self.engine.model.tokenizer, sampling or SamplingParams()
        if tokenizer is None:
            raise ModelError("this model has no tokenizer, so it cannot generate text.")
        tokens = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        if sampling.structured_output is not None:  # not in the thread that runs steps
            await asyncio.to_thread(self.engine.grammar_compiler.matcher, sampling.structured_output)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | Exception]()

        def listen(event: Event | Exception) -> None:
            with suppress(RuntimeError):  # the event loop may be closed already
                loop.call_soon_threadsafe(events.put_nowait, event)

        requests: list[Request] = []
        self._commands.put(lambda: self._submit(tokens, sampling, adapter, requests, listen))
        detokenizers = [Detokenizer(tokenizer, tokens, sampling.stop) for _ in range(sampling.n)]
        unfinished = set(range(sampling.n))
        try:
            while unfinished:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                if event.request.error:
                    raise RequestError(event.request.error)
                sample = event.request.id.sample
                delta = detokenizers[sample].update([] if event.token is None else [event.token], event.reason, sample)
                if sample in unfinished and (delta.text or delta.reason):
                    yield delta
                if delta.reason:
                    unfinished.discard(sample)
                    if not event.reason:
                        self._commands.put(lambda request=event.request: self.engine.abort(request))  # type: ignore[misc]
        finally:
            self._commands.put(lambda: self._drop(requests))

    def _submit(
        self, tokens: list[int], sampling: SamplingParams, adapter: str | None, requests: list[Request],
        listen: Callable[[Event | Exception], None],
    ) -> None:  # fmt: skip
        try:
            requests += self.engine.submit(tokens, sampling, adapter=adapter)
        except Exception as error:
            listen(error)
        self._listeners |= dict.fromkeys(requests, listen)

    def _drop(self, requests: list[Request]) -> None:
        for request in requests:
            self._listeners.pop(request, None)
            self.engine.abort(request)

    def _run(self) -> None:
        while True:
            while not self._commands.empty() or not self.engine.busy:
                command = self._commands.get()
                if command is None:
                    return
                command()
            for event in self.engine.step():
                listen = self._listeners.get(event.request)
                if listen is not None:
                    listen(event)
