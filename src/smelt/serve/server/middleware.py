"""ASGI middleware: record every request, and check it before it is routed (sizes, host and origin, API key, body)."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smelt.serve.server.auth import find_key, host_allowed, is_loopback, origin_allowed
from smelt.serve.server.errors import ApiError, ClientGoneError, as_api_error
from smelt.serve.server.rate_limit import RateLimits
from smelt.serve.server.request_record import RequestRecord, begin_record, current_record, request_id
from smelt.serve.server.settings import ServerSettings

logger = logging.getLogger(__name__)
_CLOSE = {"connection": "close"}
PUBLIC_PATHS = ("/health", "/ping", "/", "/docs")  # for probes, which have no key, and pages, which ask for one
MAX_PATH = 256  # characters of it that are recorded
DRAIN_FACTOR, DRAIN_SECONDS = 8, 1.0  # how much of a refused body is read and discarded, and for how long


RecordSink = Callable[[RequestRecord, Sequence[tuple[bytes, bytes]]], None]  # a request that has ended, its headers


class RequestRecorder:
    """Give every request an id, which its response has as a header, and pass its record on when it has ended."""

    def __init__(self, app: ASGIApp, sinks: Sequence[RecordSink] = ()) -> None:
        self.app, self.sinks = app, sinks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers, client = scope["headers"], scope.get("client")
        record = RequestRecord(
            request_id(headers), client[0] if client else "", scope["method"], scope["path"][:MAX_PATH]
        )
        begin_record(record)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                own = (b"x-request-id", record.id.encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            record.duration = time.monotonic() - record.arrival
            for sink in self.sinks:
                sink(record, headers)


class RequestGuard:
    """Wrap the whole application: no route bypasses it."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, rate_limits: RateLimits) -> None:
        self.app, self.keys, self.limits, self.root_path = app, settings.keys, settings.limits, settings.root_path
        self.local, self.rate_limits = is_loopback(settings.host), rate_limits
        self.allowed_origins = frozenset(origin.encode() for origin in settings.allowed_origins)
        self._with_cors = CORSMiddleware(  # answers preflight requests itself
            self._handle, allow_origins=settings.allowed_origins, allow_methods=("GET", "POST"), allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        origin = dict(scope["headers"]).get(b"origin")
        handle = self._with_cors if origin in self.allowed_origins else self._handle
        await handle(self._without_root_path(scope), receive, send)

    def _without_root_path(self, scope: Scope) -> Scope:
        """Accept paths with the prefix of a proxy, and without it where the proxy has removed it."""
        path, root = scope["path"], self.root_path
        return {**scope, "path": path[len(root) :]} if root and path.startswith(f"{root}/") else scope

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracked_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._check(scope)
            body = await self._body(scope, receive)
            await self.app(scope, _replay(body, receive), tracked_send)
        except ClientGoneError:
            return
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.error("request %s failed: %s at %s", current_record().id, type(error).__name__, _location(error))
            if started:
                raise ConnectionAbortedError from None  # too late for an error response: close the connection
            await as_api_error(error).response_for(scope["path"])(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if size + len(scope["raw_path"]) + len(scope["query_string"]) > self.limits.max_header_bytes:
            raise ApiError(
                431, f"request headers may have at most {self.limits.max_header_bytes:,} bytes.", headers=_CLOSE
            )
        if self.local and not host_allowed(headers):
            raise ApiError(403, "this server accepts only loopback names, such as localhost, as its Host.")
        if not origin_allowed(headers, self.allowed_origins):
            raise ApiError(403, "requests from pages of other sites are not allowed.")
        state = scope.setdefault("state", {})
        state["key"], state["authorized"] = b"", True
        if self.keys:
            key = find_key(self.keys, headers)
            if key is None and scope["method"] == "GET" and scope["path"] in PUBLIC_PATHS:
                state["authorized"] = False
            elif key is None:
                prompt = "" if b"x-api-key" in dict(headers) else ', Basic realm="smelt (the password is an API key)"'
                challenge = {"www-authenticate": f"Bearer{prompt}"}  # our pages ask for the key themselves
                raise ApiError(401, "a valid API key is required.", code="invalid_api_key", headers=challenge)
            else:
                state["key"], current_record().key_name = key, self.keys[key].name
                if scope["method"] == "POST":
                    self.rate_limits.admit_request(key)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Read the body, counting bytes as they arrive: Content-Length is only a hint."""
        limit = self.limits.max_body_bytes
        too_large = ApiError(413, f"a request body may have at most {limit:,} bytes.", headers=_CLOSE)
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
            await _drain(receive, DRAIN_FACTOR * limit)
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    if len(body) > limit:
                        await _drain(receive, DRAIN_FACTOR * limit)
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, "the request body did not arrive in time.", headers=_CLOSE) from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return the body as one message, then the messages after it."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _location(error: BaseException) -> str:
    """Return file and line without the message, which may quote the request."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown location"


async def _drain(receive: Receive, limit: int) -> None:
    """Discard the rest of the body: closing a connection while the client still writes loses the response too."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while limit > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                limit -= len(message.get("body", b""))
