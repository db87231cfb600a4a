"""POST /rerank, /score and /classify, for encoders: in the forms of Jina and Cohere, of TEI, and of vLLM.

Two texts are scored by the cosine of their embeddings or, by a cross-encoder (a classification head with one output
that reads both texts), by the sigmoid of its output.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import AliasChoices, Field
from starlette.responses import JSONResponse, Response

from smelt.serve.server.embeddings import encode_inputs, list_response, require_encoder, run_encoder
from smelt.serve.server.errors import ApiError
from smelt.serve.server.schemas import (
    MAX_PROMPTS,
    StrictModel,
    Text,
    Texts,
    TokenLists,
    Tokens,
    example,
    register_fields,
)
from smelt.serve.server.service import Service
from smelt.serve.server.unsupported import check_fields

if TYPE_CHECKING:
    from smelt.serve.encoder import Encoder

router = APIRouter()


class Document(StrictModel):
    text: Text


class RerankRequest(StrictModel):
    model_config = example(query="What is water?", documents=["A liquid.", "A city."], top_n=1)
    model: str | None = None
    query: Text
    documents: Annotated[list[Text | Document], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)] | None = (
        None
    )
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    texts: Texts | None = None  # of Hugging Face's TEI, instead of documents
    return_text: bool | None = None
    raw_scores: Literal[False] | None = None
    truncate: Literal[False] | None = None


class ScoreRequest(StrictModel):
    model_config = example(text_1="What is water?", text_2=["A liquid.", "A city."])
    model: str | None = None
    text_1: Annotated[Text | Texts, Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]
    text_2: Annotated[Text | Texts, Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))]


class ClassifyRequest(StrictModel):
    model_config = example(input="A wonderful film.")
    model: str | None = None
    input: Text | Tokens | Texts | TokenLists
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None


register_fields(Document, RerankRequest, ScoreRequest, ClassifyRequest)


@router.post("/rerank")
@router.post("/v1/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Return documents in the order of their relevance to a query; for encoders."""
    service: Service = request.app.state.service
    check_fields(body)
    if (body.documents is None) == (body.texts is None):
        raise ApiError(400, "give documents, or texts as for TEI.", param="documents")
    items = body.documents or body.texts or []
    documents = [item if isinstance(item, str) else item.text for item in items]
    scores, tokens = await _scores(request, body.model, [(body.query, document) for document in documents])
    order = sorted(range(len(documents)), key=lambda index: -scores[index])[: body.top_n]
    if body.texts is not None:
        texts = {index: {"text": documents[index]} if body.return_text else {} for index in order}
        return JSONResponse([{"index": index, "score": scores[index], **texts[index]} for index in order])
    with_documents = body.return_documents is not False
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if with_documents else {})
        for index in order
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"id": f"rerank-{uuid.uuid4().hex}", "model": service.name, "usage": usage, "results": results})


@router.post("/score")
@router.post("/v1/score")
async def score(body: ScoreRequest, request: Request) -> Response:
    """Return the scores of pairs of texts; for encoders."""
    check_fields(body)
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        message = "text_1 must be one text, or as many as text_2 has."
        raise ApiError(400, message, param="text_1")
    scores, tokens = await _scores(request, body.model, list(zip(first, second, strict=True)))
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return list_response(request.app.state.service, "score", data, tokens)


@router.post("/classify")
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """Return the probabilities of the classes; for encoders with a classification head."""
    service: Service = request.app.state.service
    check_fields(body)
    encoder = require_encoder(service, body.model)
    if not encoder.labels:
        raise ApiError(400, f"{service.name} has no classification head; use /v1/embeddings.", param="model")
    texts = await encode_inputs(service, body.input, body.truncate_prompt_tokens)
    rows = await run_encoder(request, texts, encoder.classify(texts))
    data = [
        {
            "index": index, "label": encoder.labels[max(range(len(row)), key=row.__getitem__)], "probs": row,
            "num_classes": len(row),
        }
        for index, row in enumerate(rows)
    ]  # fmt: skip
    return list_response(service, "classify", data, sum(map(len, texts)))


async def _scores(request: Request, model: str | None, pairs: list[tuple[str, str]]) -> tuple[list[float], int]:
    """Return the score of each pair of texts, and the tokens that were read."""
    service: Service = request.app.state.service
    encoder = require_encoder(service, model)
    if len(encoder.labels) > 1:
        message = f"{service.name} tells {len(encoder.labels)} classes apart and scores no pairs; use /classify."
        raise ApiError(400, message, param="model")
    unique = list(dict.fromkeys(text for pair in pairs for text in pair))
    texts = await encode_inputs(service, unique)  # refuses long ones before they are read in pairs
    if encoder.labels:
        return await _cross_encoder_scores(request, encoder, pairs)
    vectors = dict(zip(unique, await run_encoder(request, texts, encoder.embed(texts)), strict=True))
    scores = [sum(a * b for a, b in zip(vectors[first], vectors[second], strict=True)) for first, second in pairs]
    return scores, sum(map(len, texts))


async def _cross_encoder_scores(
    request: Request, encoder: Encoder, pairs: list[tuple[str, str]]
) -> tuple[list[float], int]:
    service: Service = request.app.state.service
    service.admission.check(len(pairs))
    tokens, types = await encoder.encode_pairs(pairs)
    longest = max(map(len, tokens))
    if longest > service.max_model_len:
        message = f"a pair of texts has {longest:,} tokens; it may have {service.max_model_len:,}."
        raise ApiError(400, message, code="context_length_exceeded")
    rows = await run_encoder(request, tokens, encoder.classify(tokens, types))
    return [row[0] for row in rows], sum(map(len, tokens))
