"""What every request passes before anything looks at its path: sizes, names, keys, its body. Plain ASGI."""

from __future__ import annotations

import asyncio
import logging
import traceback
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smelt.serve.server.auth import host_allowed, is_loopback, known_key, origin_allowed
from smelt.serve.server.errors import ApiError, ClientGoneError, as_api_error
from smelt.serve.server.settings import ServerSettings

log = logging.getLogger("smelt.serve")
_CLOSE = {"connection": "close"}
DRAINED, DRAIN_SECONDS = 8, 1.0  # how much more than allowed is read of a body that is refused, and for how long


class Guard:
    """Around the whole application. There is no route that it lets through unseen."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self.keys, self.limits = app, settings.keys, settings.limits
        self.local = is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = False

        async def noticed(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._check(scope)
            body = await self._body(scope, receive)
            await self.app(scope, _replayed(body, receive), noticed)
        except ClientGoneError:
            return
        except Exception as error:
            if not isinstance(error, ApiError):
                log.error("a request failed: %s at %s", type(error).__name__, _where(error))
            if started:
                raise ConnectionAbortedError from None  # nothing can be told any more: the connection is closed
            await as_api_error(error).response(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if size + len(scope["raw_path"]) + len(scope["query_string"]) > self.limits.max_header_bytes:
            raise ApiError(
                431, f"the head of a request may have {self.limits.max_header_bytes:,} bytes.", headers=_CLOSE
            )
        if self.local and not host_allowed(headers):
            raise ApiError(403, "this server answers only to names of this machine, such as localhost.")
        if not origin_allowed(headers):
            raise ApiError(403, "pages of other sites may not use this server.")
        scope.setdefault("state", {})["key"] = b""
        if self.keys:
            key = known_key(self.keys, headers)
            if key is None:
                challenge = {"www-authenticate": 'Bearer, Basic realm="smelt (the password is an API key)"'}
                raise ApiError(
                    401, "an API key is needed, and this is none.", code="invalid_api_key", headers=challenge
                )
            scope["state"]["key"] = key

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """All of it, counted as it comes: what a header says about its length is only a hint."""
        most = self.limits.max_body_bytes
        too_large = ApiError(413, f"the body of a request may have {most:,} bytes.", headers=_CLOSE)
        told = dict(scope["headers"]).get(b"content-length", b"")
        if told.isdigit() and (len(told) > 18 or int(told) > most):
            await _drain(receive, DRAINED * most)
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    if len(body) > most:
                        await _drain(receive, DRAINED * most)
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, "the body of the request did not come in time.", headers=_CLOSE) from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, then what comes after it."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _where(error: BaseException) -> str:
    """File and line, without the message: it may hold what a client sent."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


async def _drain(receive: Receive, most: int) -> None:
    """Read on for a moment: a connection that is closed while its client writes loses the answer as well."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while most > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                most -= len(message.get("body", b""))
