"""POST /v1/embeddings, for encoders."""

from __future__ import annotations

import asyncio
import base64
from array import array
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from smelt.serve.server.errors import ApiError, ClientGoneError
from smelt.serve.server.schemas import EmbeddingRequest
from smelt.serve.server.service import Service

router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(body.model)
    encoder = service.encoder
    if encoder is None:
        told = f"{service.name} is a language model and gives no embeddings; serve an encoder, such as minilm-l6."
        raise ApiError(400, told, param="model")
    if body.dimensions not in (None, encoder.width):
        raise ApiError(400, f"dimensions: the model's vectors have {encoder.width}.", param="dimensions")
    texts = await _inputs(service, body)
    service.admission.take(len(texts))
    try:
        vectors = await _unless_gone(request, encoder.embed(texts))
    finally:
        service.admission.give_back(len(texts))
    tokens = sum(map(len, texts))
    service.meters.prompt_tokens.add(tokens)
    service.meters.embedded.add(len(texts))
    for text in texts:
        service.meters.prompt_length.observe(len(text))
    written = _base64 if body.encoding_format == "base64" else list
    data = [
        {"object": "embedding", "index": place, "embedding": written(vector)} for place, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "data": data, "model": service.name, "usage": usage})


async def _inputs(service: Service, body: EmbeddingRequest) -> list[list[int]]:
    given: Any = body.input
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    texts = []
    for each in several:
        text = await service.texts.encode(each, param="input") if isinstance(each, str) else each
        if not text or len(text) > service.context:
            told = f"input: a text has {len(text):,} tokens; it may have 1 to {service.context:,}."
            raise ApiError(400, told, param="input", code="context_length_exceeded")
        service.check_tokens(text)
        texts.append(text)
    return texts


async def _unless_gone(request: Request, work: Any) -> list[list[float]]:
    """What comes of it, or ClientGoneError as soon as the client is."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        found: list[list[float]] = task.result()
        return found
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _base64(vector: list[float]) -> str:
    """Little-endian float32, as OpenAI's client reads it."""
    return base64.b64encode(array("f", vector).tobytes()).decode()
