"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from smelt.serve.server.beam_generation import create_generation
from smelt.serve.server.errors import ApiError
from smelt.serve.server.generation import (
    Delta,
    Generation,
    build_sampling_params,
    check_generation,
    prompt_logprobs_body,
)
from smelt.serve.server.schemas import ChatMessage, ChatRequest, extras
from smelt.serve.server.service import Service
from smelt.serve.server.stream import Chunk, respond
from smelt.serve.server.tokenization import AsyncTokenizer

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    check_generation(service, body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs to be true.", param="top_logprobs")
    sampling = build_sampling_params(
        body, max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None, prompt_logprobs=body.prompt_logprobs,
        vocab_size=service.vocab_size,
    )  # fmt: skip
    prompt = await service.tokenizer.encode_chat(plain_messages(body.messages))
    generation = create_generation(service, [prompt], body, sampling, request.state.key)
    writer = _Writer(service, body, generation)
    return await respond(request, generation, writer, body.stream)


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """Return the roles and texts, which is all that a chat template sees."""
    return [{"role": message.role, "content": _text(message, index)} for index, message in enumerate(messages)]


def _text(message: ChatMessage, index: int) -> str:
    param = f"messages.{index}"
    if extras(message).get("tool_calls"):
        raise ApiError(400, f"{param}: tools are not supported yet.", param=param, code="unsupported")
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    if any(part.type != "text" or part.text is None for part in parts):
        raise ApiError(400, f"{param}: this server reads text only.", param=param, code="unsupported")
    return "".join(part.text or "" for part in parts)


class _Writer:
    """Write the responses to one request."""

    def __init__(self, service: Service, body: ChatRequest, generation: Generation) -> None:
        self.tokenizer, self.body, self.generation = service.tokenizer, body, generation
        self.head = {
            "id": f"chatcmpl-{body.request_id or uuid.uuid4().hex}", "object": "chat.completion",
            "created": int(time.time()), "model": body.model or service.name,
        }  # fmt: skip

    def response(self, answers: list[Delta]) -> dict[str, Any]:
        choices = [
            self._choice(answer, message={"role": "assistant", "content": answer.text, "refusal": None})
            for answer in answers
        ]
        for position, choice in enumerate(choices):
            choice["index"] = position  # of several samples, the best may be any
        response = {**self.head, "choices": choices, "usage": self.generation.usage}
        if (count := self.body.prompt_logprobs) is not None:
            logprobs = self.generation.prompt_logprobs(0)
            response["prompt_logprobs"] = prompt_logprobs_body(self.tokenizer, logprobs, count)
        return response

    async def chunks(self) -> AsyncIterator[Chunk]:
        head = {**self.head, "object": "chat.completion.chunk"}
        options = self.body.stream_options
        usage_in_chunks = options is not None and bool(options.continuous_usage_stats)
        started: set[int] = set()
        async for deltas in self.generation.deltas():
            yield None
            for delta in deltas:
                usage = {"usage": self.generation.usage} if usage_in_chunks else {}
                if delta.index not in started:
                    started.add(delta.index)
                    first = self._choice(Delta(delta.index), delta={"role": "assistant", "content": ""})
                    yield {**head, "choices": [first], **usage}
                if delta.text or delta.logprobs or delta.reason or self.body.return_token_ids:
                    content = {"content": delta.text} if delta.text else {}
                    yield {**head, "choices": [self._choice(delta, delta=content)], **usage}
        if options is not None and options.include_usage:
            yield {**head, "choices": [], "usage": self.generation.usage}

    def _choice(self, answer: Delta, **content: Any) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": answer.index, **content, "logprobs": self._logprobs(answer),
            "finish_reason": answer.reason or None,
        }  # fmt: skip
        if self.body.return_token_ids:
            choice["token_ids"] = answer.tokens
        return choice

    def _logprobs(self, answer: Delta) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        content = [
            {
                **_entry(self.tokenizer, logprob.token, logprob.own),
                "top_logprobs": [_entry(self.tokenizer, *pair) for pair in logprob.top],
            }
            for logprob in answer.logprobs
        ]
        return {"content": content, "refusal": None}


def _entry(tokenizer: AsyncTokenizer, token: int, value: float) -> dict[str, Any]:
    text, content = tokenizer.token(token)
    return {"token": text, "logprob": value, "bytes": list(content)}
