"""Routes about the server itself: models, health, version, metrics, and the live page with its state."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from smelt.serve.server.errors import ApiError
from smelt.serve.server.service import Service
from smelt.version import __version__

router = APIRouter()
PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")  # self-contained: it reads /state only


def _hashes(tag: str) -> str:
    """Return the CSP hashes of the page's own inline scripts or styles."""
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/models", include_in_schema=False)
@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    service: Service = request.app.state.service
    return {"object": "list", "data": [_model_card(service, name) for name in service.names]}


@router.get("/models/{name:path}", include_in_schema=False)
@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
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
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return PlainTextResponse(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/state")
async def state(request: Request) -> dict[str, Any]:
    """Return what the live page shows."""
    service: Service = request.app.state.service
    supervisor = service.supervisor
    return {
        "model": service.name,
        "version": __version__,
        "device": service.settings.device,
        "kind": "language model" if supervisor is not None else "encoder",
        "max_model_len": service.max_model_len,
        "backend": supervisor.engine.backend if supervisor is not None and supervisor.engine is not None else "eager",
        "uptime": time.time() - service.created,
        "unhealthy_reason": service.unhealthy_reason,
        "admitted": service.admission.admitted,
        "capacity": service.admission.capacity,
        "worker": supervisor.client.pid if supervisor is not None else None,
        "replicas": supervisor.client.replicas if supervisor is not None else {},
        **service.metrics.snapshot(),
    }


@router.get("/", response_class=HTMLResponse)
async def page() -> Response:
    headers = {"content-security-policy": CONTENT_SECURITY_POLICY, "cache-control": "no-store"}
    return HTMLResponse(PAGE, headers=headers)


def _model_card(service: Service, name: str) -> dict[str, Any]:
    """Describe the model or one of its adapters, whose `root` is the model."""
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "smelt",
        "max_model_len": service.max_model_len, "root": service.name,
    }  # fmt: skip
