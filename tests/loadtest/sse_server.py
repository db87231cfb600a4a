"""A real server on loopback that streams completions with known delays, in its own thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass
class LockstepClock:
    """A client's clock that only the server advances, once the client has read it for everything sent so far."""

    now: float = 0.0
    readings: int = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now

    async def advance(self, seconds: float, readings: int) -> None:
        while self.readings < readings:
            await asyncio.sleep(0.001)
        self.now += seconds


@dataclass
class SseServer:
    """Send the first chunk after `first` seconds and each further one after `gap`, as many as requested."""

    first: float = 0.05
    gap: float = 0.01
    together: int = 1  # tokens per chunk
    usage: bool = True
    key: str = ""
    models: tuple[str, ...] = ("tiny",)
    tokenizes: bool = False
    fails: Callable[[int], str] = lambda number: (
        ""
    )  # failure of the nth completion: "503", "cut", "error", "slow", or none
    bodies: list[Body] = field(default_factory=list)
    clock: LockstepClock | None = None  # for one request at a time; none: the delays are real
    hold: int = 0  # answer only once so many completions are being served
    at_once: int = 0
    most_at_once: int = 0

    def __enter__(self) -> SseServer:
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head.split("\r\n")[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self._answer(head.split()[1], headers, json.loads(body or b"{}"), writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, headers: dict[str, str], body: Body, writer: asyncio.StreamWriter) -> None:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            plain(writer, 401, {"error": {"message": "no key"}})
        elif path == "/v1/models":
            plain(writer, 200, {"data": [{"id": name} for name in self.models]})
        elif path == "/tokenize" and self.tokenizes:
            plain(writer, 200, {"tokens": [number % 90 for number in range(2 * len(body["prompt"].split()))]})
        elif path in ("/v1/completions", "/v1/chat/completions") and body["model"] in self.models:
            self.bodies.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                await self._stream(writer, body, self.fails(len(self.bodies) - 1), "chat" in path)
            finally:
                self.at_once -= 1
        else:
            plain(writer, 404, {"error": {"message": f"no such thing: {body.get('model', path)}"}})

    async def _stream(self, writer: asyncio.StreamWriter, body: Body, failing: str, chat: bool) -> None:
        if failing.isdecimal():
            plain(writer, int(failing), {"error": {"message": "the queue is full"}})
            return
        start(writer, 200, "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked")
        loop = asyncio.get_running_loop()
        while self.most_at_once < self.hold:
            await asyncio.sleep(0.001)
        deadline = loop.time() + self.first + (30 if failing == "slow" else 0)
        readings = 1  # by the client: when it sends, and at each event
        if chat:
            event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            readings += 1
        count = body["max_tokens"]
        for number in range(0, count, self.together):
            if self.clock:
                await self.clock.advance(self.gap if number else self.first, readings)
            else:
                await asyncio.sleep(max(0.0, deadline - loop.time()))
            deadline += self.gap
            readings += 1
            if failing == "cut" and number:
                return
            if failing == "error" and number:
                event(writer, {"error": {"message": "the engine died"}})
            last = number + self.together >= count
            choice = {"delta": {"content": "word "}} if chat else {"text": "word "}
            event(writer, {"choices": [{"index": 0, **choice, "finish_reason": "length" if last else None}]})
        if self.usage:
            event(writer, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}})
        chunk(writer, b"data: [DONE]\n\n")
        chunk(writer, b"")


def start(writer: asyncio.StreamWriter, status: int, headers: str) -> None:
    writer.write(f"HTTP/1.1 {status} Said\r\n{headers}\r\nConnection: close\r\n\r\n".encode())


def plain(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    start(writer, status, f"Content-Type: application/json\r\nContent-Length: {len(body)}")
    writer.write(body)


def chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


def event(writer: asyncio.StreamWriter, content: Any) -> None:
    chunk(writer, f"data: {json.dumps(content)}\n\n".encode())
