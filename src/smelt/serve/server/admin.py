"""Routes that change the server, under vLLM's names: LoRA adapters while it runs, sleep and wake.

All are off by default. Where there are API keys, they need one with `admin=allow`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from smelt.serve.server.errors import ApiError
from smelt.serve.server.schemas import StrictModel, example, register_fields
from smelt.serve.server.service import Service

router = APIRouter()


class LoadLoraRequest(StrictModel):
    model_config = example(lora_name="poet", lora_path="poet")
    lora_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./:-]{1,128}$")]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadLoraRequest(StrictModel):
    model_config = example(lora_name="poet")
    lora_name: Annotated[str, Field(min_length=1, max_length=128)]


register_fields(LoadLoraRequest, UnloadLoraRequest)


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadLoraRequest, request: Request) -> Response:
    """Load a LoRA adapter from a folder below --lora-root; needs --allow-lora-updates."""
    service, name = _service(request, "allow_lora_updates"), body.lora_name
    folder = await asyncio.to_thread(_adapter_folder, body.lora_path, service.settings.lora_roots)
    if name in (service.name, *service.aliases):
        raise ApiError(400, "that is the name of the model; choose another.", param="lora_name")
    await service.require_supervisor().load_adapter(name, folder)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadLoraRequest, request: Request) -> Response:
    """Unload a LoRA adapter that no request uses; needs --allow-lora-updates."""
    service, name = _service(request, "allow_lora_updates"), body.lora_name
    await service.require_supervisor().unload_adapter(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


@router.post("/sleep")
async def sleep(request: Request, level: int = 1) -> Response:
    """End the engine's process, which frees the memory of the KV cache and of the weights, whatever the level."""
    service = _service(request, "enable_sleep_mode")
    if level not in (1, 2):
        raise ApiError(400, "level is 1 or 2.", param="level")
    await service.require_supervisor().sleep()
    return Response()


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Start the engine's process again; needs --enable-sleep-mode."""
    service = _service(request, "enable_sleep_mode")
    await service.require_supervisor().wake_up()
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Say whether the engine sleeps; needs --enable-sleep-mode."""
    return JSONResponse({"is_sleeping": _service(request, "enable_sleep_mode").require_supervisor().asleep})


def _service(request: Request, option: str) -> Service:
    """Return the service if its operator has enabled the route and the client may use it."""
    service: Service = request.app.state.service
    if not getattr(service.settings, option):
        message = f"this route is off; start the server with --{option.replace('_', '-')}."
        raise ApiError(404, message, code="disabled")
    key = request.state.key
    if key and not service.settings.keys[key].allow_admin:
        message = "this API key may not change the server; have admin=allow set for the key."
        raise ApiError(403, message, code="admin_not_allowed")
    return service


def _adapter_folder(path: str, roots: tuple[str, ...]) -> str:
    """Return an existing folder below one of the roots, symbolic links resolved; a relative path is below a root."""
    for root in map(Path.resolve, map(Path, roots)):
        try:
            folder = (root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            continue
        if folder.is_relative_to(root) and folder.is_dir():
            return str(folder)
    raise ApiError(400, "lora_path is not a folder below one that --lora-root names.", param="lora_path")
