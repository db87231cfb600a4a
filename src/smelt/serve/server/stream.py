"""Respond as server-sent events or in one response; both notice when the client disconnects."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from smelt.serve.server.errors import ApiError, ClientGoneError, as_api_error
from smelt.serve.server.generation import PING_SECONDS, Delta, Generation
from smelt.serve.worker.client import WorkerDiedError

PING = b": still here\n\n"
DONE = b"data: [DONE]\n\n"
Chunk = dict[str, Any] | None  # None: nothing new, so a ping may be due


# Not line ends of server-sent events, but of many readers of lines: httpx and str.splitlines end a line there.
_SEPARATORS = str.maketrans({separator: f"\\u{ord(separator):04x}" for separator in "\x85\u2028\u2029"})


def sse_event(content: Any) -> bytes:
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text if text.isascii() else text.translate(_SEPARATORS)}\n\n".encode()


def named_event(content: dict[str, Any]) -> bytes:
    """Return an event whose name is its type, as Anthropic's clients and OpenAI's Responses expect."""
    return f"event: {content['type']}\n".encode() + sse_event(content)


class ResponseWriter(Protocol):
    """Write the answers to one request in the format of its route."""

    def response(self, answers: list[Delta]) -> dict[str, Any]:
        """Return the body of a response with complete answers."""

    def chunks(self) -> AsyncIterator[Chunk]:
        """Yield the chunks of a stream."""


@dataclass(frozen=True)
class StreamFormat:
    """How an API writes the chunks of a stream, a sign of life, an error, and the end."""

    encode: Callable[[dict[str, Any]], bytes] = sse_event
    encode_error: Callable[[ApiError], bytes] = lambda error: sse_event(error.body) + DONE
    ping: bytes = PING
    done: bytes = DONE
    media_type: str = "text/event-stream"


OPENAI_STREAM = StreamFormat()


async def respond(
    request: Request,
    generation: Generation,
    writer: ResponseWriter,
    stream: bool | None,
    stream_format: StreamFormat = OPENAI_STREAM,
) -> Response:
    """Start a generation, which may refuse it, and respond as events or with complete answers."""
    await generation.start()
    if stream:
        return EventStreamResponse(generation, writer.chunks, stream_format)
    return JSONResponse(writer.response(generation.select(await collect(request, generation))))


class EventStreamResponse(Response):
    """Send the chunks of a generation; an error after the first byte is sent as an event."""

    def __init__(
        self,
        generation: Generation,
        chunks: Callable[[], AsyncIterator[Chunk]],
        stream_format: StreamFormat = OPENAI_STREAM,
    ) -> None:
        self.generation, self.chunks, self.format = generation, chunks, stream_format
        self.media_type = stream_format.media_type
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = "abort"
        watcher = asyncio.create_task(_watch(receive, self.generation))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._events()) as events:
                async for content in events:
                    await send({"type": "http.response.body", "body": content, "more_body": True})
            await send({"type": "http.response.body", "body": self.format.done})
        except ClientGoneError:
            pass
        except Exception as error:
            reason = "error" if isinstance(error, WorkerDiedError) else "abort"
            content = self.format.encode_error(as_api_error(error))
            await send({"type": "http.response.body", "body": content})
        finally:
            watcher.cancel()
            self.generation.close(reason)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        last_sent = time.monotonic()
        async for chunk in self.chunks():
            if chunk is not None or time.monotonic() - last_sent >= PING_SECONDS:
                yield self.format.ping if chunk is None else self.format.encode(chunk)
                last_sent = time.monotonic()


async def collect(request: Request, generation: Generation) -> list[Delta]:
    """Wait for all answers."""
    reason = "abort"
    answers = [Delta(answer.index) for answer in generation.answers]
    watcher = asyncio.create_task(_watch(request.receive, generation))
    try:
        async with aclosing(generation.deltas()) as updates:
            async for deltas in updates:
                for delta in deltas:
                    answers[delta.index].extend(delta)
    except WorkerDiedError:
        reason = "error"
        raise
    finally:
        watcher.cancel()
        generation.close(reason)
    return answers


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.disconnect()
