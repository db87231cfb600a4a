"""Connections without a model: clients that do not send, clients that do not read, and too many at once."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from smelt.serve.server.connection import TimedConnection
from smelt.serve.server.http_server import tls_context
from smelt.serve.server.settings import ServerLimits, TlsFiles
from tests.serve.certificates import write_certificate

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter, list[str]], Awaitable[None]]


@pytest.fixture(params=["http", "https"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> TlsFiles | None:
    return TlsFiles(*map(str, write_certificate(tmp_path))) if request.param == "https" else None


def run_connection(
    monkeypatch: pytest.MonkeyPatch, talk: Talk, answer: bytes = b"ok", tls: TlsFiles | None = None, **limits: Any
) -> list[str]:
    """Run a client against the server and return what the application saw."""
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        events.append("request")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": answer, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        while (await receive())["type"] != "http.disconnect":
            pass
        events.append("gone")

    async def main() -> None:
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
        config.load()
        state, loop = ServerState(), asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: TimedConnection(config, state, {}), "127.0.0.1", 0, ssl=None if tls is None else tls_context(tls)
        )
        trusting = None if tls is None else ssl.create_default_context(cafile=tls.certificate)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1, ssl=trusting)
            async with asyncio.timeout(60):
                await talk(reader, writer, events)
            writer.transport.abort()
            await asyncio.sleep(0.05)

    monkeypatch.setattr(TimedConnection, "limits", ServerLimits(**limits))
    asyncio.run(main())
    return events


@pytest.mark.parametrize("slowly", [False, True])
def test_a_client_that_does_not_finish_its_headers_is_dropped(
    monkeypatch: pytest.MonkeyPatch, slowly: bool, tls: TlsFiles | None
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[str]) -> None:
        try:
            while slowly and not (reader.at_eof() or writer.transport.is_closing()):
                writer.write(HEAD[:1] if not seen else b"")
                await asyncio.sleep(0.05)
            await reader.read()
        except ConnectionError:
            pass

    started = time.monotonic()
    assert run_connection(monkeypatch, talk, tls=tls, header_timeout=0.3) == []
    assert time.monotonic() - started > 0.3


def test_a_client_that_does_not_read_is_dropped_and_the_application_notified(
    monkeypatch: pytest.MonkeyPatch, tls: TlsFiles | None
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[str]) -> None:
        writer.write(HEAD)
        while "gone" not in seen:
            await asyncio.sleep(0.02)

    assert run_connection(monkeypatch, talk, b"x" * (1 << 20), tls, client_timeout=0.3) == ["request", "gone"]


def test_a_slow_reader_is_kept(monkeypatch: pytest.MonkeyPatch, tls: TlsFiles | None) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[str]) -> None:
        writer.write(HEAD)
        size = 0
        while size < 100 * (1 << 17):
            received = await reader.read(1 << 18)
            assert received
            size += len(received)
            await asyncio.sleep(0.05)

    started = time.monotonic()
    assert run_connection(monkeypatch, talk, b"x" * (1 << 17), tls, client_timeout=2)[0] == "request"
    assert time.monotonic() - started > 2, "it was read so fast that nothing was tested"


def test_too_many_connections_and_broken_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[str]) -> None:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[str]) -> None:
        writer.write(b"nonsense\r\n\r\n")
        received = await reader.read(-1)
        assert received.startswith(b"HTTP/1.1 400") and b'"type": "invalid_request_error"' in received

    assert run_connection(monkeypatch, nothing, max_connections=0) == []
    assert run_connection(monkeypatch, broken) == []
