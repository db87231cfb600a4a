"""A small HTTP/1.1 client on asyncio streams: one request per connection, the response read as it arrives."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from smelt.errors import RequestError

_LIMIT = 2**20  # bytes of a line, a chunk or a response that is read at once
_MAX_HEADERS = 256


class ExchangeError(Exception):
    """A failed request: the reason, and details."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, " ".join(detail.split())[:200]


@dataclass(frozen=True)
class Address:
    """The address of a server. `prefix` precedes `/v1`."""

    secure: bool
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Address:
        try:
            parts = urlsplit(url.strip())
            port = parts.port
        except ValueError as error:
            raise RequestError(f"{url!r:.80} is not the address of a server ({error}).") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"{url!r:.80} is not the address of a server; write it as http://localhost:8000.")
        if parts.username is not None or parts.query or parts.fragment:
            raise RequestError("the address may have only a server and a path; pass a key with --api-key-file.")
        secure, prefix = parts.scheme == "https", parts.path.rstrip("/").removesuffix("/v1")
        if any(not 32 < ord(letter) < 127 for letter in parts.hostname + prefix):
            raise RequestError(f"{url!r:.80} is not the address of a server; non-ASCII characters must be escaped.")
        return cls(secure, parts.hostname, port or (443 if secure else 80), prefix)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.prefix}"


class Reply:
    """A response whose headers have been read."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status, self.headers, self._reader = status, headers, reader

    async def blocks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; fail if the connection closes before its end."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := _chunk_size(await self._reader.readuntil(b"\n")):
                yield (await self._reader.readexactly(size + 2))[:-2]
        elif "content-length" in self.headers:
            left = _integer(self.headers["content-length"])
            while left:
                block = await self._reader.read(min(left, _LIMIT))
                if not block:
                    raise ExchangeError("cut off", "the connection was closed in the middle of a response")
                left -= len(block)
                yield block
        else:
            while block := await self._reader.read(_LIMIT):
                yield block

    async def lines(self) -> AsyncIterator[bytes]:
        rest = b""
        async for block in self.blocks():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
            if len(rest) > _LIMIT:
                raise ExchangeError("not understood", "a line of the answer has no end")
        if rest:
            yield rest

    async def json(self) -> Any:
        """Return the body as JSON, or None if it is not JSON."""
        body = b""
        async for block in self.blocks():
            body += block
            if len(body) > 16 * _LIMIT:
                raise ExchangeError("not understood", "the answer is too long")
        with suppress(ValueError, RecursionError):
            return json.loads(body)
        return None


@asynccontextmanager
async def exchange(address: Address, path: str, content: Any = None, key: str = "") -> AsyncIterator[Reply]:
    """Send a GET, or a POST of JSON if there is content. Failures, also inside, are raised as `ExchangeError`."""
    writer: asyncio.StreamWriter | None = None
    try:
        try:
            context = ssl.create_default_context() if address.secure else None
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, limit=_LIMIT)
        except OSError as error:  # refused, unknown, unreachable, or no trust
            raise ExchangeError("no connection", error.strerror or str(error)) from error
        writer.write(_request_bytes(address, path, content, key))
        await writer.drain()
        yield await _read_head(reader)
    except asyncio.IncompleteReadError as error:
        raise ExchangeError("cut off", "the connection was closed in the middle of a response") from error
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise ExchangeError("not understood", f"the response is not valid HTTP ({error})") from error
    except OSError as error:
        raise ExchangeError("cut off", error.strerror or str(error)) from error
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _request_bytes(address: Address, path: str, content: Any, key: str) -> bytes:
    body = b"" if content is None else json.dumps(content).encode()
    host = str(address).partition("//")[2].partition("/")[0]
    lines = [
        f"{'GET' if content is None else 'POST'} {address.prefix}{path} HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        "Accept: text/event-stream, application/json",
        *((f"Content-Type: application/json\r\nContent-Length: {len(body)}",) if body else ()),
        *((f"Authorization: Bearer {key}",) if key else ()),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def _read_head(reader: asyncio.StreamReader) -> Reply:
    words = (await reader.readuntil(b"\n")).decode("latin-1").split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/"):
        raise ExchangeError("not understood", "the server does not speak HTTP")
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        line = (await reader.readuntil(b"\n")).decode("latin-1").strip()
        if not line:
            return Reply(_integer(words[1]), headers, reader)
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    raise ExchangeError("not understood", "the answer has too many headers")


def _integer(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise ExchangeError("not understood", "the response is not valid HTTP")
    return int(text)


def _chunk_size(line: bytes) -> int:
    """Parse the size of a chunk: hexadecimal before any `;`."""
    size = int(line.split(b";")[0].strip() or b"-1", 16)
    if not 0 <= size <= 16 * _LIMIT:
        raise ExchangeError("not understood", "a chunk of the answer has an impossible size")
    return size
