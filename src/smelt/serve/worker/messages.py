"""Typed messages between the server and the engine's process, as JSON over a socket. Never pickle."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple


@dataclass(frozen=True)
class StartEngine:
    """The first message to the worker."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)  # of the engine


@dataclass(frozen=True)
class SubmitRequest:
    """Queue one prompt, which may be sampled several times."""

    request_id: str
    prompt: list[int]
    sampling: dict[str, Any]  # SamplingParams as JSON
    priority: int = 0
    salt: str = ""  # hexadecimal
    adapter: str | None = None
    tenant: str = ""  # whom fair queueing counts it for
    weight: int = 1


@dataclass(frozen=True)
class AbortSample:
    request_id: str
    sample: int


@dataclass(frozen=True)
class LoadAdapter:
    """Load a LoRA adapter while the engine runs; answered by `AdapterChanged`, as is the next."""

    name: str
    folder: str


@dataclass(frozen=True)
class UnloadAdapter:
    name: str


@dataclass(frozen=True)
class AdapterChanged:
    """An adapter was loaded or unloaded, in the order of the messages that asked for it."""

    error: str = ""  # not empty: it was not


@dataclass(frozen=True)
class EngineReady:
    """The model is loaded; everything but `state` stays as it is."""

    folder: str
    max_model_len: int
    max_request_tokens: int
    vocab_size: int
    backend: str
    blocks: int
    block_size: int
    state: dict[str, int]
    eos_token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class NotALanguageModel:
    folder: str
    task: str


@dataclass(frozen=True)
class StartFailed:
    message: str


@dataclass(frozen=True)
class RequestAccepted:
    """The constraint of a request has been compiled, and the request is queued."""

    request_id: str


@dataclass(frozen=True)
class RequestRejected:
    """A request cannot be run, or its answer cannot be completed."""

    request_id: str
    message: str
    overloaded: bool = False  # not for its own sake: it may be sent again later


# Of one prompt token: its log-probability and rank, and the most likely tokens with their log-probabilities.
PromptTokenLogprobs = tuple[float, int, Sequence[tuple[int, float]]]


class SampledToken(NamedTuple):
    """A token of one sample, or its end, or both."""

    request_id: str
    sample: int
    token: int | None
    logprobs: tuple[float, Sequence[tuple[int, float]]] | None  # of the token, and of the most likely ones
    reason: str  # not empty: the sample has finished
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    started: float  # when the engine first computed some of it, by time.monotonic()
    prompt_logprobs: Sequence[PromptTokenLogprobs] | None = None  # of the next prompt tokens, from the second on


@dataclass
class StepOutput:
    """What one step sampled; without tokens, only a new state."""

    state: dict[str, int]
    tokens: list[SampledToken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [SampledToken(*row) for row in self.tokens]


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of the process, sent by a thread of its own."""

    step_seconds: float = 0.0  # that the current step has run
    step_limit: float | None = None  # that it may run, by those before it; None: unknown


WorkerMessage = (
    StartEngine
    | SubmitRequest
    | AbortSample
    | LoadAdapter
    | UnloadAdapter
    | AdapterChanged
    | EngineReady
    | NotALanguageModel
    | StartFailed
    | RequestAccepted
    | RequestRejected
    | StepOutput
    | Heartbeat
)
_CLASSES: dict[str, Any] = {
    message.__name__: message
    for message in (
        *(StartEngine, SubmitRequest, AbortSample, LoadAdapter, UnloadAdapter, AdapterChanged),
        *(EngineReady, NotALanguageModel, StartFailed, RequestAccepted, RequestRejected, StepOutput, Heartbeat),
    )
}


def encode(message: WorkerMessage) -> bytes:
    return json.dumps([type(message).__name__, vars(message)], separators=(",", ":")).encode()


def decode(content: bytes | str) -> WorkerMessage:
    name, fields = json.loads(content)
    message: WorkerMessage = _CLASSES[name](**fields)
    return message


class Pipe:
    """One end of the connection. Several threads may send, one may receive."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        self._sending = threading.Lock()

    def send(self, message: WorkerMessage) -> None:
        content = encode(message)
        with self._sending:
            self._connection.send_bytes(content)

    def receive(self) -> WorkerMessage:
        """Return the next message; raise EOFError if the other end is closed."""
        return decode(self._connection.recv_bytes())

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether a message arrives within the timeout (None: wait for one)."""
        return self._connection.poll(timeout)

    def close(self) -> None:
        """Shut down both directions, also for threads that read or write; the descriptor closes with this object."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end, suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def pipe_pair() -> tuple[Pipe, socket.socket]:
    """Return our end, and the worker's end before it is handed over."""
    ours, theirs = socket.socketpair()
    return Pipe(ours.detach()), theirs
