"""Ollama's API, translated to chat requests: /api/chat, /api/generate, /api/tags, /api/ps, /api/show, /api/version."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from smelt.serve.server.answer_blocks import AnswerBlock, BlockAssembler, BlockEvent, chat_request, refuse_fields
from smelt.serve.server.chat_generation import ChatGeneration, prepare_chat
from smelt.serve.server.errors import ApiError
from smelt.serve.server.generation import Delta
from smelt.serve.server.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    StrictModel,
    Text,
    Tool,
    example,
    register_fields,
)
from smelt.serve.server.service import Service
from smelt.serve.server.stream import Chunk, StreamFormat, respond
from smelt.version import __version__

router = APIRouter(prefix="/api")


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


_STREAM = StreamFormat(
    encode=_line,
    encode_error=lambda error: _line(error.body_for("/api/chat")),
    ping=b"",  # clients read every line as JSON
    done=b"",
    media_type="application/x-ndjson",
)
_UNSUPPORTED = {
    "images": "this server reads text only",
    "suffix": "text cannot be inserted before a suffix",
    "template": "the chat template is the model's own and cannot be sent",
    "context": "send the conversation to /api/chat",
    "raw": "use /v1/completions for prompts without a chat template",
}
_UNSUPPORTED_OPTIONS = {"mirostat": 0, "tfs_z": 1, "typical_p": 1, "dry_multiplier": 0}  # but for these values
# Sampling options and their names in chat requests. Those of the engine (num_ctx, num_gpu, ...) are ignored.
_OPTIONS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed", "stop": "stop",
    "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}  # fmt: skip


class OllamaMessage(StrictModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None


class OllamaRequest(StrictModel):
    """Fields that /api/chat and /api/generate share."""

    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None


class OllamaChatRequest(OllamaRequest):
    model_config = example(model="MODEL", messages=[{"role": "user", "content": "Why is the sky blue?"}])
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    model_config = example(model="MODEL", prompt="Why is the sky blue?")
    prompt: Text = ""
    system: Text | None = None


class OllamaShowRequest(StrictModel):
    model_config = example(model="MODEL")
    model: str | None = None
    name: str | None = None


register_fields(OllamaMessage, OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest)


@router.post("/chat")
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation in Ollama's format, by default as a stream of lines of JSON."""
    fields: dict[str, Any] = {"messages": _translate_messages(body.messages)}
    if body.tools:
        fields["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    return await _answer(body, fields, request, "message")


@router.post("/generate")
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """Answer one prompt in Ollama's format."""
    messages = [{"role": "system", "content": body.system}] if body.system else []
    if body.prompt:
        messages.append({"role": "user", "content": body.prompt})
    return await _answer(body, {"messages": messages}, request, "response")


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of Smelt, as Ollama's clients ask for it."""
    return {"version": __version__}


@router.get("/tags")
@router.get("/ps")
async def tags(request: Request) -> dict[str, Any]:
    """List the model and its adapters in Ollama's format."""
    service: Service = request.app.state.service
    modified = datetime.fromtimestamp(service.created, UTC).isoformat()
    return {
        "models": [
            {"name": name, "model": name, "modified_at": modified, "size": 0, "digest": "", "details": _details()}
            for name in service.names
        ]
    }


@router.post("/show")
async def show(body: OllamaShowRequest, request: Request) -> dict[str, Any]:
    """Describe the model in Ollama's format: its template, its context, what it can do."""
    service: Service = request.app.state.service
    service.check_model(_model_name(service, body.model or body.name or "?"))
    chosen = service.output_format
    capabilities = ["embedding"] if service.supervisor is None else ["completion"]
    capabilities += ["tools"] if chosen.calls is not None and service.supervisor is not None else []
    capabilities += ["thinking"] if chosen.reasoning is not None or chosen.is_harmony else []
    return {
        "template": service.tokenizer.template, "details": _details(), "capabilities": capabilities,
        "model_info": {"general.architecture": "smelt", "smelt.context_length": service.max_model_len},
    }  # fmt: skip


def _details() -> dict[str, Any]:
    return {"format": "", "family": "", "families": None, "parameter_size": "", "quantization_level": ""}


def _model_name(service: Service, name: str) -> str:
    """Drop the tag that Ollama's clients add to a name."""
    return name.removesuffix(":latest") if name not in service.names else name


def _timestamp() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def _answer(body: OllamaRequest, fields: dict[str, Any], request: Request, key: str) -> Response:
    service: Service = request.app.state.service
    name = _model_name(service, body.model)
    if not fields["messages"]:  # clients load a model before they use it
        service.check_model(name)
        empty = {"message": {"role": "assistant", "content": ""}} if key == "message" else {"response": ""}
        return JSONResponse(
            {"model": body.model, "created_at": _timestamp(), **empty, "done": True, "done_reason": "load"}
        )
    chat = await prepare_chat(service, _translate(body, {**fields, "model": name}), request.state.key)
    return await respond(request, chat.generation, _Writer(body.model, chat, key), body.stream is not False, _STREAM)


def _translate(body: OllamaRequest, fields: dict[str, Any]) -> ChatRequest:
    refuse_fields(body.model_extra or {}, _UNSUPPORTED)
    options = body.options or {}
    for name, value in _UNSUPPORTED_OPTIONS.items():
        if options.get(name) not in (None, value):
            raise ApiError(400, f"options: {name} is not supported.", param="options", code="unsupported")
    fields |= {name: options.get(option) for option, name in _OPTIONS.items()}
    if isinstance(fields["seed"], float) and fields["seed"].is_integer():
        fields["seed"] = int(fields["seed"])
    limit = options.get("num_predict")
    if not (isinstance(limit, int) and limit < 0):  # negative: no limit
        fields["max_tokens"] = limit
    if body.think is not None:
        fields["reasoning_effort"] = body.think if isinstance(body.think, str) else "medium" if body.think else "none"
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    return chat_request(fields)


def _translate_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Give calls the ids that Ollama's API has not: the results of tools come in the order of their calls."""
    chat: list[dict[str, Any]] = []
    calls = results = 0
    for message in messages:
        refuse_fields(message.model_extra or {}, {"images": _UNSUPPORTED["images"]})
        translated: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            translated["reasoning_content"] = message.thinking
        if message.tool_calls:
            functions = [call.get("function") for call in message.tool_calls]
            translated["tool_calls"] = [
                {"id": f"call_{calls + index}", "type": "function", "function": function}
                for index, function in enumerate(functions)
            ]
            results, calls = calls, calls + len(functions)
        if message.role == "tool":
            translated["tool_call_id"] = f"call_{results}"
            results += 1
        chat.append(translated)
    return chat


class _Writer:
    """Write the responses to one request, whose text is under `message` or `response`."""

    def __init__(self, model: str, chat: ChatGeneration, key: str) -> None:
        self.model, self.chat, self.key, self.blocks = model, chat, key, BlockAssembler()

    def response(self, answers: list[Delta]) -> dict[str, Any]:
        delta = self.chat.parse(answers[0])
        self.blocks.add(delta.parts)
        texts = {
            kind: "".join(block.text for block in self.blocks.blocks if block.type == kind)
            for kind in ("text", "reasoning")
        }
        calls = [_call(block) for block in self.blocks.blocks if block.type == "call"]
        return self._content(texts["text"], texts["reasoning"], calls) | self._end(delta.reason)

    async def chunks(self) -> AsyncIterator[Chunk]:
        async for deltas in self.chat.deltas():
            yield None
            for delta in deltas:
                for event in self.blocks.add(delta.parts) + (self.blocks.finish() if delta.reason else []):
                    if (content := self._event(event)) is not None:
                        yield {**content, "done": False}
                if delta.reason:
                    yield self._content() | self._end(delta.reason)

    def _event(self, event: BlockEvent) -> dict[str, Any] | None:
        block_type = event.block.type
        if block_type == "call":
            return self._content(calls=[_call(event.block)]) if event.event == "end" else None
        if event.event != "delta":
            return None
        return self._content(event.text) if block_type == "text" else self._content(thinking=event.text)

    def _content(self, text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        head = {"model": self.model, "created_at": _timestamp()}
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if self.key == "response":
            return {**head, "response": text, **more}
        more |= {"tool_calls": calls} if calls else {}
        return {**head, "message": {"role": "assistant", "content": text, **more}}

    def _end(self, reason: str) -> dict[str, Any]:
        (prompt,), (answer,) = self.chat.generation.prompts, self.chat.generation.answers
        seconds = {
            "total_duration": time.monotonic() - self.chat.generation.arrival,
            "load_duration": 0.0,
            "prompt_eval_duration": answer.first - answer.started,
            "eval_duration": answer.last - answer.first,
        }
        return {
            "done": True, "done_reason": "length" if reason == "length" else "stop",
            "prompt_eval_count": len(prompt), "eval_count": answer.count,
            **{name: max(0, int(value * 1e9)) for name, value in seconds.items()},
        }  # fmt: skip


def _call(block: AnswerBlock) -> dict[str, Any]:
    try:
        arguments = json.loads(block.text or "{}")
    except (ValueError, RecursionError):  # the answer was cut off
        arguments = {}
    return {"function": {"name": block.name, "arguments": arguments}}
