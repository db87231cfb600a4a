"""The process that runs the engine: takes requests from the pipe, steps, and sends what each step gave.

    python -m smelt.serve.worker.loop DESCRIPTOR      (started by `smelt.serve.worker.client`)

Its first message holds the options of the engine. It ends when the pipe is closed, so that no engine outlives its
server.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from smelt.errors import SmeltError
from smelt.serve.worker.pipe import Message, Pipe


class Loop:
    """One engine and its pipe."""

    def __init__(self, pipe: Pipe) -> None:
        from smelt.models.load import resolve, skeleton
        from smelt.models.model import Model
        from smelt.serve.engine.engine import Engine

        self.pipe, options = pipe, pipe.receive()
        self.folder = str(resolve(options["model"]))
        task = Model(skeleton(self.folder)).task
        if task != "language":
            pipe.send({"kind": "other", "folder": self.folder, "task": task})
            raise EOFError
        self.engine = Engine(**options)  # by the name that was given: a bundled model is served in its own bits
        self.engine.warmup()
        self.requests: dict[str, list[Any]] = {}  # of each name, the requests that have not ended
        pipe.send({"kind": "ready", **self._facts()})

    def run(self) -> None:
        while True:
            while self.pipe.waiting(0.0 if self.engine.busy else None):
                self.take(self.pipe.receive())
            before = self.engine.state()["computed_tokens"]
            events = self.engine.step()
            state = self._state()
            if events or state["state"]["computed_tokens"] != before:  # a step that did nothing is no sign of life
                self.pipe.send({"kind": "events", "events": [_plain(event) for event in events], **state})
            for event in events:
                if event.reason:
                    self._forget(event.request)

    def take(self, message: Message) -> None:
        if message["kind"] == "submit":
            self._submit(message)
        elif message["kind"] == "abort":
            for request in self.requests.get(message["name"], []):
                if request.id.sample == message["sample"]:
                    self.engine.abort(request)
                    self._forget(request)
            self.pipe.send({"kind": "state", **self._state()})

    def _submit(self, message: Message) -> None:
        from smelt.serve.engine.sampling_params import SamplingParams

        name = message["name"]
        try:
            self.requests[name] = self.engine.submit(
                message["prompt"],
                SamplingParams.from_json(message["sampling"]),
                name=name,
                priority=message.get("priority", 0),
                salt=bytes.fromhex(message.get("salt", "")),
                adapter=message.get("adapter"),
            )
        except SmeltError as error:
            self.pipe.send({"kind": "refused", "name": name, "why": type(error).__name__, "sentence": str(error)})

    def _forget(self, request: Any) -> None:
        name = request.id.name
        left = [each for each in self.requests.get(name, []) if each is not request]
        if left:
            self.requests[name] = left
        else:
            self.requests.pop(name, None)

    def _facts(self) -> Message:
        """What does not change."""
        engine = self.engine
        return {
            "folder": self.folder,
            "context": engine.max_model_len,
            "longest": engine.max_request_tokens,
            "vocabulary": engine.vocab_size,
            "ends": list(engine.runner.eos_token_ids),
            "path": engine.runner.backend,
            "blocks": engine.pool.blocks,
            "block": engine.pool.size,
            **self._state(),
        }

    def _state(self) -> Message:
        return {"state": self.engine.state()}


def _plain(event: Any) -> list[Any]:
    """[name, sample, token, logprobs, reason, tokens found in the cache, when it was first computed]"""
    logprobs = None if event.logprobs is None else [event.logprobs.own, event.logprobs.top]
    request = event.request
    return [*request.id, event.token, logprobs, event.reason, request.num_cached_tokens, round(request.started, 6)]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole group of processes: the server decides when to end
        signal.signal(number, signal.SIG_IGN)
    pipe = Pipe(int(sys.argv[1]))
    try:
        Loop(pipe).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the interpreter's own way out takes seconds
    except SmeltError as error:
        pipe.send({"kind": "failed", "sentence": str(error)})
        sys.exit(2)


if __name__ == "__main__":
    main()
