"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from smelt.serve.server.chat_generation import Call, ChatAnswer, ChatDelta, ChatGeneration, prepare_chat
from smelt.serve.server.generation import Delta, logprobs_body, prompt_logprobs_body
from smelt.serve.server.parsers.base import CallStart, Content, Part, Reasoning
from smelt.serve.server.schemas import ChatRequest
from smelt.serve.server.service import Service
from smelt.serve.server.stream import Chunk, respond
from smelt.serve.server.tools import message_text

router = APIRouter()


@router.post("/chat/completions", include_in_schema=False)
@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, in one response or as server-sent events."""
    service: Service = request.app.state.service
    chat = await prepare_chat(service, body, request.state.key)
    return await respond(request, chat.generation, _Writer(service, body, chat), body.stream)


class _Writer:
    """Write the responses to one request."""

    def __init__(self, service: Service, body: ChatRequest, chat: ChatGeneration) -> None:
        self.tokenizer, self.body, self.chat, self.generation = service.tokenizer, body, chat, chat.generation
        self.head = {
            "id": f"chatcmpl-{body.request_id or uuid.uuid4().hex}", "object": "chat.completion",
            "created": int(time.time()), "model": body.model or service.name,
            "system_fingerprint": service.system_fingerprint,
        }  # fmt: skip
        last, index = body.messages[-1], len(body.messages) - 1
        self.echo = message_text(last, index) if body.echo and last.role == "assistant" else ""
        self.with_reasoning = body.include_reasoning is not False

    def response(self, answers: list[Delta]) -> dict[str, Any]:
        choices = []
        for position, answer in enumerate(answers):  # of several samples, the best may be any
            delta = self.chat.parse(answer)
            message = self._message(self.chat.answers[answer.index])
            choices.append(
                {"token_ids": None, **self._choice(answer, delta.reason, message=message), "index": position}
            )
        response = {
            **self.head, "choices": choices, "usage": self.generation.usage, "prompt_logprobs": None,
            "prompt_token_ids": self.generation.prompts[0] if self.body.return_token_ids else None,
        }  # fmt: skip
        if (count := self.body.prompt_logprobs) is not None:
            logprobs = self.generation.prompt_logprobs(0)
            response["prompt_logprobs"] = prompt_logprobs_body(self.tokenizer, logprobs, count)
        return response

    async def chunks(self) -> AsyncIterator[Chunk]:
        head = {**self.head, "object": "chat.completion.chunk"}
        options = self.body.stream_options
        usage_in_chunks = options is not None and bool(options.include_usage and options.continuous_usage_stats)
        started: set[int] = set()
        async for deltas in self.chat.deltas():
            yield None
            for delta in deltas:
                usage = {"usage": self.generation.usage} if usage_in_chunks else {}
                index = delta.raw.index
                if index not in started:
                    started.add(index)
                    first = self._choice(Delta(index), "", delta={"role": "assistant", "content": self.echo})
                    with_prompt = self.body.return_token_ids and len(started) == 1
                    prompt = {"prompt_token_ids": self.generation.prompts[0]} if with_prompt else {}
                    before = {"usage": self.generation.initial_usage} if usage and len(started) == 1 else usage
                    yield {**head, "choices": [first], **prompt, **before}
                for choice in self._delta_choices(delta):
                    yield {**head, "choices": [choice], **usage}
        if options is not None and options.include_usage:
            yield {**head, "choices": [], "usage": self.generation.usage}

    def _delta_choices(self, delta: ChatDelta) -> list[dict[str, Any]]:
        """Return one choice for each part: the first with the tokens, the last with the reason."""
        raw, count = delta.raw, len(self.chat.answers[delta.raw.index].calls)
        index = count - sum(isinstance(part, CallStart) for part in delta.parts) - 1  # of the call that went on
        contents = []
        for part in delta.parts:
            if isinstance(part, Reasoning) and not self.with_reasoning:
                continue
            index += isinstance(part, CallStart)
            contents.append(self._part_content(part, raw.index, index))
        shown = raw.logprobs or delta.reason or (self.body.return_token_ids and raw.tokens)
        if (not contents and shown) or (delta.reason == "tool_calls" and contents):
            contents.append({})
        choices = []
        for number, content in enumerate(contents):
            tokens = raw if number == 0 else Delta(raw.index)
            reason = delta.reason if number == len(contents) - 1 else ""
            choices.append(self._choice(tokens, reason, delta=content))
        return choices

    def _message(self, answer: ChatAnswer) -> dict[str, Any]:
        content = self.echo + answer.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.calls:
            message |= {"content": content or None, "tool_calls": [call.to_json() for call in answer.calls]}
        if answer.reasoning and self.with_reasoning:  # under the names of DeepSeek and vLLM
            message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
        return message

    def _part_content(self, part: Part, answer: int, index: int) -> dict[str, Any]:
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text, "reasoning": part.text}
        call = self.chat.answers[answer].calls[index]
        if isinstance(part, CallStart):
            return {"tool_calls": [{"index": index, **Call(call.id, call.name).to_json()}]}
        return {"tool_calls": [{"index": index, "function": {"arguments": part.text}}]}

    def _choice(self, answer: Delta, reason: str, **content: Any) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": answer.index, **content, "logprobs": self._logprobs(answer),
            "finish_reason": reason or None,
        }  # fmt: skip
        if self.body.return_token_ids:
            choice["token_ids"] = answer.tokens
        return choice

    def _logprobs(self, answer: Delta) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": logprobs_body(self.tokenizer, answer.logprobs), "refusal": None}
