"""What a client is told when something is wrong: OpenAI's form, one sentence, never any text of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from smelt.errors import RequestError
from smelt.serve.worker.client import WorkerDiedError

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request is answered with this."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


class ClientGoneError(Exception):
    """Nobody is there any longer to be told anything."""


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an error of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, WorkerDiedError):
        return ApiError(500, str(error), code="engine_died")
    return ApiError(500, "the server failed at this request; it is a bug of ours.", code="internal_error")


async def on_api_error(_: Request, error: Exception) -> JSONResponse:
    return as_api_error(error).response


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    told = {404: "there is no such route.", 405: f"this route does not take {request.method[:10]}."}
    sentence = told.get(error.status_code, "the request cannot be read.")
    return ApiError(error.status_code, sentence, headers=error.headers).response


async def on_wrong_shape(_: Request, error: Exception) -> JSONResponse:
    """The first thing that is wrong. What was given is not repeated: it may be a prompt."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = _place(first["loc"])
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is no valid JSON.").response
    if first["type"] == "model_attributes_type" and param is None:
        return ApiError(400, "the body must be a JSON object, sent as application/json.").response
    where = f"{param}: " if param else ""
    return ApiError(400, f"{where}{first['msg'][:200]}.", param=param).response


def _place(parts: Sequence[Any]) -> str | None:
    """The fields that lead to it; a key that a client made up is left out."""
    from smelt.serve.server.schemas import FIELDS

    known = [str(part) for part in parts[1:] if isinstance(part, int) or part in FIELDS]
    return ".".join(known) or None
