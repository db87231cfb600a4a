"""Typed messages between the server and the engine's process, as JSON over a socket. Never pickle.

Each message follows its length, so that the engine, which must not wait for a slow client, can read and write in parts.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_LENGTH = struct.Struct("!I")
MAX_UNSENT_BYTES = 64 << 20  # to a client that does not read; then it counts as lost


@dataclass(frozen=True)
class StartEngine:
    """The first message to the worker."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)  # of the engine
    listen: str = ""  # path of a Unix socket for more clients; empty: only the one that sends this


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
    pid: int = 0


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


def decode(content: bytes | bytearray | str) -> WorkerMessage:
    name, fields = json.loads(content)
    message: WorkerMessage = _CLASSES[name](**fields)
    return message


def _frame(message: WorkerMessage) -> bytes:
    content = encode(message)
    return _LENGTH.pack(len(content)) + content


class Pipe:
    """A client's end of the connection, which blocks. Several threads may send, one may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._reader = connection, connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: WorkerMessage) -> None:
        frame = _frame(message)
        with self._sending:
            self._socket.sendall(frame)

    def receive(self) -> WorkerMessage:
        """Return the next message; raise EOFError if the other end is closed."""
        return decode(self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0]))

    def _read(self, size: int) -> bytes:
        content = self._reader.read(size)
        if len(content) < size:
            raise EOFError
        return content

    def close(self) -> None:
        """Shut down both directions, also for threads that read or write; the descriptor closes with this object."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        with suppress(OSError):
            self._reader.close()
            self._socket.close()


class Channel:
    """The engine's end of the connection, which never blocks: what a client does not read waits here.

    Several threads may send, one may receive. `closed` if the client has gone, or has left too much unread.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._sending = connection, threading.Lock()
        self._received, self._unsent = bytearray(), bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[WorkerMessage]:
        """Return the messages that have arrived completely."""
        try:
            while content := self._socket.recv(1 << 20):
                self._received += content
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        messages, start = [], 0
        while len(self._received) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._received, start)[0]
            if len(self._received) < end:
                break
            messages.append(decode(self._received[start + _LENGTH.size : end]))
            start = end
        del self._received[:start]
        return messages

    def wait(self) -> WorkerMessage:
        """Wait for the next message, which must be the only one; raise EOFError if there comes none."""
        while not self.closed:
            select.select([self], [], [])
            if messages := self.receive():
                return messages[0]
        raise EOFError

    def send(self, message: WorkerMessage) -> None:
        frame = _frame(message)
        with self._sending:
            self._unsent += frame
            self._flush()

    def flush(self) -> bool:
        """Send what is left; return whether nothing is."""
        with self._sending:
            self._flush()
            return self.closed or not self._unsent

    def _flush(self) -> None:
        try:
            while self._unsent and not self.closed:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            self.closed = len(self._unsent) > MAX_UNSENT_BYTES
        except OSError:
            self.closed = True

    def close(self) -> None:
        self.closed = True
        self._socket.close()


def pipe_pair() -> tuple[Pipe, socket.socket]:
    """Return our end, and the worker's end before it is handed over."""
    ours, theirs = socket.socketpair()
    return Pipe(ours), theirs
