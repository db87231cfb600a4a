"""Messages between two processes: JSON over a socket, one after the other. Never pickle."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

Message = dict[str, Any]


class Pipe:
    """One end."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def send(self, message: Message) -> None:
        self._connection.send_bytes(json.dumps(message, separators=(",", ":")).encode())

    def receive(self) -> Message:
        """The next message; EOFError when the other side is gone."""
        found: Message = json.loads(self._connection.recv_bytes())
        return found

    def waiting(self, seconds: float | None = 0.0) -> bool:
        """Whether a message is there, or comes within so many seconds (None: however long it takes)."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        """End both directions, also for a thread that is reading or writing just now; the descriptor goes with us."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end, suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def pipe_pair() -> tuple[Pipe, socket.socket]:
    """Our end, and the other process's end before it is handed over."""
    ours, theirs = socket.socketpair()
    return Pipe(ours.detach()), theirs
