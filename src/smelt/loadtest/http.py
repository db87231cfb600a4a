"""A small HTTP/1.1 client on asyncio's streams: one request a connection, the answer read as it comes."""

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

_LIMIT = 2**20  # bytes of a line, a chunk or an answer that is read whole
_MOST_HEADERS = 256


class Failed(Exception):
    """An exchange that did not come to its end: of what kind, and what was said."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, " ".join(detail.split())[:200]


@dataclass(frozen=True)
class Address:
    """Of a server. `prefix` stands before `/v1`."""

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
            raise RequestError(f"{url!r:.80} is no address of a server ({error}).") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"{url!r:.80} is no address of a server; write it as http://localhost:8000.")
        if parts.username is not None or parts.query or parts.fragment:
            raise RequestError("the address holds more than a server and a path; a key is given with --api-key-file.")
        secure, prefix = parts.scheme == "https", parts.path.rstrip("/").removesuffix("/v1")
        if any(not 32 < ord(letter) < 127 for letter in parts.hostname + prefix):
            raise RequestError(f"{url!r:.80} is no address of a server; letters outside of ASCII must be escaped.")
        return cls(secure, parts.hostname, port or (443 if secure else 80), prefix)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.prefix}"


class Reply:
    """The answer of a server: its head is read, its body comes."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status, self.headers, self._reader = status, headers, reader

    async def blocks(self) -> AsyncIterator[bytes]:
        """The body as it comes, to its true end: a connection that breaks before it is a failure."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := _size(await self._reader.readuntil(b"\n")):
                yield (await self._reader.readexactly(size + 2))[:-2]
        elif "content-length" in self.headers:
            left = _whole(self.headers["content-length"])
            while left:
                block = await self._reader.read(min(left, _LIMIT))
                if not block:
                    raise Failed("cut off", "the connection was closed in the middle of an answer")
                left -= len(block)
                yield block
        else:
            while block := await self._reader.read(_LIMIT):
                yield block

    async def lines(self) -> AsyncIterator[bytes]:
        held = b""
        async for block in self.blocks():
            *lines, held = (held + block).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
            if len(held) > _LIMIT:
                raise Failed("not understood", "a line of the answer has no end")
        if held:
            yield held

    async def json(self) -> Any:
        """The whole body; None where it is not JSON."""
        body = b""
        async for block in self.blocks():
            body += block
            if len(body) > 16 * _LIMIT:
                raise Failed("not understood", "the answer is too long")
        with suppress(ValueError, RecursionError):
            return json.loads(body)
        return None


@asynccontextmanager
async def exchange(address: Address, path: str, content: Any = None, key: str = "") -> AsyncIterator[Reply]:
    """A GET, or a POST of JSON where there is content. What goes wrong, inside too, is a `Failed`."""
    writer: asyncio.StreamWriter | None = None
    try:
        try:
            context = ssl.create_default_context() if address.secure else None
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, limit=_LIMIT)
        except OSError as error:  # refused, unknown, unreachable, or no trust
            raise Failed("no connection", error.strerror or str(error)) from error
        writer.write(_head_and_body(address, path, content, key))
        await writer.drain()
        yield await _head(reader)
    except asyncio.IncompleteReadError as error:
        raise Failed("cut off", "the connection was closed in the middle of an answer") from error
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise Failed("not understood", f"the answer is not HTTP as we know it ({error})") from error
    except OSError as error:
        raise Failed("cut off", error.strerror or str(error)) from error
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _head_and_body(address: Address, path: str, content: Any, key: str) -> bytes:
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


async def _head(reader: asyncio.StreamReader) -> Reply:
    words = (await reader.readuntil(b"\n")).decode("latin-1").split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/"):
        raise Failed("not understood", "the server does not speak HTTP")
    headers: dict[str, str] = {}
    for _ in range(_MOST_HEADERS):
        line = (await reader.readuntil(b"\n")).decode("latin-1").strip()
        if not line:
            return Reply(_whole(words[1]), headers, reader)
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    raise Failed("not understood", "the answer has too many headers")


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise Failed("not understood", "the answer is not HTTP as we know it")
    return int(text)


def _size(line: bytes) -> int:
    """Of a chunk, in hexadecimal before any `;`."""
    size = int(line.split(b";")[0].strip() or b"-1", 16)
    if not 0 <= size <= 16 * _LIMIT:
        raise Failed("not understood", "a chunk of the answer has an impossible size")
    return size
