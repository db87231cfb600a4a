"""What is asked about the server itself: models, health, version, metrics, the page and its numbers."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from smelt.serve.server.errors import ApiError
from smelt.serve.server.page import PAGE, POLICY
from smelt.serve.server.service import Service
from smelt.version import __version__

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    return {"object": "list", "data": [_card(service, name) for name in service.names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    service.check_model(name or "?")
    return _card(service, name)


@router.get("/health")
async def health(request: Request) -> Response:
    trouble = request.app.state.service.trouble
    if trouble:
        return ApiError(503, trouble, code="unhealthy").response
    return JSONResponse({"status": "ok"})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return PlainTextResponse(service.meters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/state")
async def state(request: Request) -> dict[str, Any]:
    """The numbers of the page."""
    service: Service = request.app.state.service
    process = service.supervisor.client.process if service.supervisor is not None else None
    return {
        "model": service.name,
        "version": __version__,
        "device": service.settings.device,
        "kind": "language model" if service.supervisor is not None else "encoder",
        "context": service.context,
        "path": service.supervisor.facts["path"] if service.supervisor is not None else "eager",
        "seconds": time.time() - service.created,
        "trouble": service.trouble,
        "answers": service.admission.taken,
        "room": service.admission.room,
        "worker": process.pid if process is not None else None,
        "replicas": service.supervisor.client.replicas if service.supervisor is not None else {},
        **service.meters.plain(),
    }


@router.get("/", response_class=HTMLResponse)
async def page() -> Response:
    return HTMLResponse(PAGE, headers={"content-security-policy": POLICY, "cache-control": "no-store"})


def _card(service: Service, name: str) -> dict[str, Any]:
    """An adapter's says which model it belongs to."""
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "smelt",
        "max_model_len": service.context, "root": service.name,
    }  # fmt: skip
