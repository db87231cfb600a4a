"""Routes about the server itself: models, health, version, metrics, and the state that the chat page shows."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from smelt.serve.server.errors import ApiError
from smelt.serve.server.service import Service
from smelt.version import __version__

router = APIRouter()


@router.get("/models", include_in_schema=False)
@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the model and its adapters."""
    service: Service = request.app.state.service
    return {"object": "list", "data": [_model_card(service, name) for name in service.names]}


@router.get("/models/{name:path}", include_in_schema=False)
@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """Describe the model or one adapter."""
    service: Service = request.app.state.service
    service.check_model(name or "?")
    return _model_card(service, name)


@router.get("/health")
@router.get("/ping")
async def health(request: Request) -> Response:
    """Report whether requests can be served; without a key, where there are keys, only that."""
    reason = request.app.state.service.unhealthy_reason
    if reason and not request.state.authorized:
        return JSONResponse({"status": "unhealthy"}, 503)
    if reason:
        return ApiError(503, reason, code="unhealthy").response
    return JSONResponse({"status": "ok"})


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of Smelt."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics under vLLM's names."""
    service: Service = request.app.state.service
    return PlainTextResponse(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/state")
async def state(request: Request) -> dict[str, Any]:
    """Return the figures of the chat page: what runs and waits, the KV cache, latencies, the last two minutes."""
    service: Service = request.app.state.service
    supervisor = service.supervisor
    return {
        "model": service.name,
        "version": __version__,
        "device": service.settings.device,
        "kind": "language model" if supervisor is not None else "encoder",
        "max_model_len": service.max_model_len,
        "chat_template": bool(service.tokenizer.tokenizer.chat_template),
        "backend": supervisor.engine.backend if supervisor is not None and supervisor.engine is not None else "eager",
        "uptime": time.time() - service.created,
        "unhealthy_reason": service.unhealthy_reason,
        "admitted": service.admission.admitted,
        "capacity": service.admission.capacity,
        "worker": supervisor.client.pid if supervisor is not None else None,
        "replicas": supervisor.client.replicas if supervisor is not None else {},
        **service.metrics.snapshot(),
    }


def _model_card(service: Service, name: str) -> dict[str, Any]:
    """Describe the model or one of its adapters, whose `root` and `parent` are the model."""
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "smelt",
        "max_model_len": service.max_model_len, "root": service.name,
        "parent": service.name if service.adapter_name(name) else None,
    }  # fmt: skip
