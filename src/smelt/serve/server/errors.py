"""Errors as OpenAI's API reports them: one sentence, which never quotes a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from smelt.errors import RequestError
from smelt.serve.engine.request import ContextLengthError
from smelt.serve.worker.client import OverloadedError, WorkerDiedError

_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        error_type = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the body in the format of the API that a route belongs to."""
        if path.startswith("/v1/messages"):
            default = "api_error" if self.status >= 500 else "invalid_request_error"
            error_type = _ANTHROPIC_TYPES.get(self.status, default)
            return {"type": "error", "error": {"type": error_type, "message": self.message}}
        if path.startswith("/api/"):
            return {"error": self.message}
        return self.body

    def response_for(self, path: str) -> JSONResponse:
        return JSONResponse(self.body_for(path), self.status, self.headers)

    @property
    def response(self) -> JSONResponse:
        return self.response_for("")


class ClientGoneError(Exception):
    """The client has disconnected, so nobody can be answered."""


def as_api_error(error: Exception) -> ApiError:
    """Convert any exception to the error response for the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return ApiError(400, str(error), code=code)
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"})
    if isinstance(error, WorkerDiedError):
        return ApiError(500, str(error), code="engine_died")
    return ApiError(500, "the server failed to handle this request; this is a bug.", code="internal_error")


async def on_api_error(request: Request, error: Exception) -> JSONResponse:
    return as_api_error(error).response_for(request.url.path)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    messages = {404: "there is no such route.", 405: f"this route does not accept {request.method[:10]}."}
    message = messages.get(error.status_code, "the request cannot be read.")
    return ApiError(error.status_code, message, headers=error.headers).response_for(request.url.path)


async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
    """Report the first invalid field without its value, which may be a prompt."""
    assert isinstance(error, RequestValidationError)
    first = _clearest(error.errors())
    param, path = _field_path(first["loc"]), request.url.path
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON.").response_for(path)
    if first["type"] == "model_attributes_type" and param is None:
        return ApiError(400, "the body must be a JSON object, sent as application/json.").response_for(path)
    prefix = f"{param}: " if param else ""
    return ApiError(400, f"{prefix}{first['msg'][:200]}.", param=param).response_for(path)


def _clearest(errors: Sequence[Any]) -> Any:
    """Return the first error; where a field has several types, that of the type that was meant: not one of types."""
    same_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    return next((error for error in same_field if not error["type"].endswith("_type")), errors[0])


def _field_path(parts: Sequence[Any]) -> str | None:
    """Return the dotted path of a field, leaving out keys that a client made up."""
    from smelt.serve.server.schemas import FIELDS

    names = [str(part) for part in parts[1:] if isinstance(part, int) or part in FIELDS]
    return ".".join(names) or None
