"""uvicorn's HTTP connection with timeouts: a client that neither sends nor reads is dropped."""

from __future__ import annotations

import asyncio
import fcntl
import json
import socket
import struct
import termios
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from smelt.serve.server.errors import ApiError
from smelt.serve.server.request_record import new_request_id
from smelt.serve.server.settings import ServerLimits

_TCP_INFO_ACKED = 120  # offset of tcpi_bytes_acked in Linux' struct tcp_info


class TimedConnection(H11Protocol):
    """Drop a client that does not finish its request headers or does not read the response.

    Its request is then aborted like that of any client that disconnects.
    """

    limits = ServerLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = self.loop.time()
        self._idle_since, self._progress_at = now, now
        self._unacked, self._acked = 0, 0
        self._timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
        else:
            self._schedule_check()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = json.dumps(ApiError(400, "this is not a valid HTTP request, or its headers are too long.").body).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += f"x-request-id: {new_request_id()}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _schedule_check(self) -> None:
        delay = min(self.limits.header_timeout, self.limits.client_timeout) / 4
        self._timer = self.loop.call_later(delay, self._check)

    def _check(self) -> None:
        now = self.loop.time()
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._idle_since = now
        unacked, acked = self._acknowledgments()
        if unacked == 0 or unacked < self._unacked or acked > self._acked:
            self._progress_at = now
        self._unacked, self._acked = unacked, acked
        if now - self._idle_since > self.limits.header_timeout or now - self._progress_at > self.limits.client_timeout:
            self.transport.abort()
        else:
            self._schedule_check()

    def _acknowledgments(self) -> tuple[int, int]:
        """Return how many bytes the client has not acknowledged, and how many it has.

        The kernel buffers megabytes per connection, so the transport's own buffer alone would reveal a client that
        does not read only after all of that is full.
        """
        unacked, acked = self.transport.get_write_buffer_size(), 0
        connection = self.transport.get_extra_info("socket")
        try:
            queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_ACKED + 8)
            unacked += struct.unpack("i", queued)[0]
            acked = struct.unpack_from("=Q", info, _TCP_INFO_ACKED)[0]
        except (OSError, AttributeError, struct.error):  # not Linux, or already closed
            pass
        return unacked, acked
