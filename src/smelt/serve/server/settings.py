"""Server settings, and the limits that every request is checked against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ServerLimits:
    """ServerLimits checked before the engine sees a request. Timeouts are in seconds."""

    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 32 << 10  # including path and query
    max_connections: int = 4096
    max_sequences: int = 256  # per request: prompts times n
    max_queued: int = 512  # sequences that wait for the engine, over all requests
    header_timeout: float = 20.0  # for the headers of a request to arrive
    body_timeout: float = 60.0
    client_timeout: float = 30.0  # without the client reading a byte: the connection is dropped
    request_timeout: float = 3600.0  # from arrival to the end of the answer
    step_timeout: float = 300.0  # without a finished step while requests run: the engine is killed
    shutdown_timeout: float = 30.0  # for running requests to finish after SIGTERM or SIGINT
    max_restarts: int = 3  # of the engine within `restart_window`, before the server exits
    restart_window: float = 600.0


@dataclass(frozen=True)
class ServerSettings:
    """ServerSettings of one server."""

    model: str
    name: str = ""  # in the API; by default the last part of `model`
    host: str = "127.0.0.1"
    port: int = 8000
    keys: frozenset[bytes] = frozenset()  # SHA-256 of each API key; if empty, none is required
    device: str = "cpu"
    engine: dict[str, Any] = field(default_factory=dict)  # engine options
    adapters: dict[str, str] = field(default_factory=dict)  # LoRA adapters: folders by name
    limits: ServerLimits = ServerLimits()
    replicas: int = 1
