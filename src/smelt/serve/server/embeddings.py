"""POST /v1/embeddings, for encoders."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from array import array
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from smelt.serve.server.errors import ApiError, ClientGoneError
from smelt.serve.server.request_record import current_record
from smelt.serve.server.schemas import EmbeddingRequest
from smelt.serve.server.service import Service
from smelt.serve.server.tokenization import INLINE_CHARACTERS
from smelt.serve.server.unsupported import check_fields

if TYPE_CHECKING:
    from smelt.serve.encoder import Encoder

router = APIRouter()


@router.post("/embeddings", include_in_schema=False)
@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Return embeddings of texts: the normalized mean over their tokens; for encoders."""
    service: Service = request.app.state.service
    check_fields(body)
    encoder = require_encoder(service, body.model)
    if encoder.labels:
        message = f"{service.name} is a classifier and has no embeddings; use /classify."
        raise ApiError(400, message, param="model")
    if body.dimensions not in (None, encoder.hidden_size):
        raise ApiError(400, f"dimensions: the model's vectors have {encoder.hidden_size}.", param="dimensions")
    texts = await encode_inputs(service, body.input, body.truncate_prompt_tokens)
    vectors = await run_encoder(request, texts, encoder.embed(texts))
    tokens = sum(map(len, texts))
    convert = _base64 if body.encoding_format == "base64" else list
    data = [
        {"object": "embedding", "index": index, "embedding": convert(vector)} for index, vector in enumerate(vectors)
    ]
    return list_response(service, "embd", data, tokens)


def list_response(service: Service, kind: str, data: list[dict[str, Any]], tokens: int) -> Response:
    """Return a list of results as OpenAI does, with vLLM's further fields."""
    return JSONResponse({
        "id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": service.name,
        "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    })  # fmt: skip


def require_encoder(service: Service, model: str | None) -> Encoder:
    service.check_model(model)
    if service.encoder is None:
        message = f"{service.name} is a language model without embeddings; serve an encoder, such as minilm-l6."
        raise ApiError(400, message, param="model")
    return service.encoder


async def run_encoder(request: Request, texts: list[list[int]], work: Any) -> list[list[float]]:
    """Await the encoder's work on these texts, within the limits of the server, and count it."""
    service: Service = request.app.state.service
    tokens, key = sum(map(len, texts)), request.state.key
    service.admission.acquire(len(texts), key)
    try:
        service.rate_limits.admit_tokens(key, tokens)
        rows = await _unless_disconnected(request, work)
    finally:
        service.admission.release(len(texts), key)
        work.close()  # if it was refused before it began
    record = current_record()
    record.model, record.prompt_tokens = service.name, tokens
    service.metrics.prompt_tokens.inc(tokens)
    service.metrics.embeddings.inc(len(texts))
    for text in texts:
        service.metrics.request_prompt_tokens.observe(len(text))
    return rows


async def encode_inputs(service: Service, content: Any, truncate: int | None = None) -> list[list[int]]:
    """Return the tokens of one or several texts, each of which may be tokens already: all of them, or at most the first
    `truncate` (-1: as many as fit) with the token that ends a text."""
    limit = service.max_model_len if truncate == -1 else truncate
    if limit is not None and not 0 < limit <= service.max_model_len:
        message = f"truncate_prompt_tokens: it must be -1, or 1 to {service.max_model_len:,}."
        raise ApiError(400, message, param="truncate_prompt_tokens")
    inputs = content if isinstance(content, list) and not isinstance(content[0], int) else [content]
    service.admission.check(len(inputs))
    inline = sum(map(len, inputs)) <= INLINE_CHARACTERS
    texts = []
    for item in inputs:
        if isinstance(item, str):
            item = item if limit is None else service.tokenizer.shorten(item)
            text = await service.tokenizer.encode(item, param="input", inline=inline)
        else:
            text = item
        if limit is not None and len(text) > limit:
            end = text[-1:] if text[-1] in service.tokenizer.special_ids else []
            text = text[: limit - len(end)] + end
        if not text or len(text) > service.max_model_len:
            message = f"input: a text has {len(text):,} tokens; it must have 1 to {service.max_model_len:,}."
            raise ApiError(400, message, param="input", code="context_length_exceeded")
        service.check_tokens(text)
        texts.append(text)
    return texts


async def _unless_disconnected(request: Request, work: Any) -> list[list[float]]:
    """Await the work, or raise ClientGoneError when the client disconnects."""
    task, disconnected = asyncio.ensure_future(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        vectors: list[list[float]] = task.result()
        return vectors
    finally:
        task.cancel()
        disconnected.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _base64(vector: list[float]) -> str:
    """Encode as little-endian float32, as OpenAI's client expects."""
    return base64.b64encode(array("f", vector).tobytes()).decode()
