"""ASGI middleware that checks every request before it is routed: sizes, host and origin, API key, body."""

from __future__ import annotations

import asyncio
import logging
import traceback
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smelt.serve.server.auth import find_key, host_allowed, is_loopback, origin_allowed
from smelt.serve.server.errors import ApiError, ClientGoneError, as_api_error
from smelt.serve.server.settings import ServerSettings

logger = logging.getLogger(__name__)
_CLOSE = {"connection": "close"}
DRAIN_FACTOR, DRAIN_SECONDS = 8, 1.0  # how much of a refused body is read and discarded, and for how long


class RequestGuard:
    """Wrap the whole application: no route bypasses it."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self.keys, self.limits = app, settings.keys, settings.limits
        self.local = is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
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
                logger.error("a request failed: %s at %s", type(error).__name__, _location(error))
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
        if not origin_allowed(headers):
            raise ApiError(403, "requests from pages of other sites are not allowed.")
        scope.setdefault("state", {})["key"] = b""
        if self.keys:
            key = find_key(self.keys, headers)
            if key is None:
                challenge = {"www-authenticate": 'Bearer, Basic realm="smelt (the password is an API key)"'}
                raise ApiError(401, "a valid API key is required.", code="invalid_api_key", headers=challenge)
            scope["state"]["key"] = key

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
