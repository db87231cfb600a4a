"""The FastAPI application: every route behind the middleware."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from smelt.errors import RequestError
from smelt.serve.server import (
    admin,
    chat,
    completions,
    embeddings,
    messages,
    ollama,
    pages,
    responses,
    scoring,
    status,
    tokens,
)
from smelt.serve.server.errors import ApiError, on_api_error, on_http_error, on_validation_error
from smelt.serve.server.middleware import RecordSink, RequestGuard, RequestRecorder
from smelt.serve.server.service import Service
from smelt.serve.worker.client import OverloadedError, WorkerDiedError
from smelt.version import __version__


def create_app(service: Service, sinks: Sequence[RecordSink] = ()) -> ASGIApp:
    """Return the application; `sinks` are called with the record of every request that has ended."""
    # FastAPI's docs pages would load scripts from other sites; its redirects would repeat the Host header of a client.
    root_path = service.settings.root_path
    app = FastAPI(
        title="smelt serve", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False,
        servers=[{"url": root_path}] if root_path else None,
    )  # fmt: skip
    app.state.service = service
    for module in (completions, chat, responses, messages, ollama, embeddings, scoring, tokens, admin, status):
        app.include_router(module.router, tags=[module.__name__.rpartition(".")[2]])
    app.include_router(pages.router)
    for error in (ApiError, RequestError, OverloadedError, WorkerDiedError):
        app.add_exception_handler(error, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    return RequestRecorder(RequestGuard(app, service.settings, service.rate_limits), sinks)
