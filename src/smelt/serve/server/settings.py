"""What an operator can set, and the limits that no request gets past."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Numbers, all checked before the engine sees anything. Times are in seconds."""

    body_bytes: int = 4 << 20
    header_bytes: int = 32 << 10  # path and query included
    connections: int = 4096
    prompts: int = 256  # in one request
    answers: int = 256  # prompts times n
    queue: int = 512  # answers that wait for their turn, of all requests together
    head_seconds: float = 20.0  # for the head of a request to come
    body_seconds: float = 60.0  # for its body
    reader_seconds: float = 30.0  # without a byte read: the client is dropped
    request_seconds: float = 3600.0  # from a request's arrival to its end
    silence_seconds: float = 300.0  # without a finished step while requests run: the engine counts as dead
    grace_seconds: float = 30.0  # to finish what runs after SIGTERM or SIGINT
    restarts: int = 3  # of the engine's process within `restart_window`, after which the server gives up
    restart_window: float = 600.0


@dataclass(frozen=True)
class Settings:
    """One server."""

    model: str
    name: str = ""  # what clients call the model; by default the last part of `model`
    host: str = "127.0.0.1"
    port: int = 8000
    keys: frozenset[bytes] = frozenset()  # SHA-256 of every API key; none: no key is asked for
    device: str = "cpu"
    engine: dict[str, Any] = field(default_factory=dict)  # options of the engine
    adapters: dict[str, str] = field(default_factory=dict)  # low-rank ones: what clients call them, and their folders
    limits: Limits = Limits()
    replicas: int = 1  # engines that answer
