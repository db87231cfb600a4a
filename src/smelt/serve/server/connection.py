"""One connection: uvicorn's, and dropped when its client neither sends nor reads for too long."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from smelt.serve.server.errors import ApiError
from smelt.serve.server.settings import Limits


class Connection(H11Protocol):
    """A client that does not finish the head of a request, or does not read its answer, is let go; its request is
    then aborted like that of any client that leaves."""

    limits = Limits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = self.loop.time()
        self._idle_since, self._read_at, self._unread = now, now, 0
        self._watch: asyncio.TimerHandle | None = None
        if len(self.connections) > self.limits.connections:
            transport.abort()
        else:
            self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = json.dumps(ApiError(400, "this is no valid HTTP request, or its head is too long.").body).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _look_again(self) -> None:
        soon = min(self.limits.head_seconds, self.limits.reader_seconds) / 4
        self._watch = self.loop.call_later(soon, self._look)

    def _look(self) -> None:
        now = self.loop.time()
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._idle_since = now
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread < self._unread:
            self._read_at = now
        self._unread = unread
        if now - self._idle_since > self.limits.head_seconds or now - self._read_at > self.limits.reader_seconds:
            self.transport.abort()
        else:
            self._look_again()
