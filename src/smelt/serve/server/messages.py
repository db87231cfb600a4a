"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, translated to a chat request."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from smelt.serve.server.answer_blocks import (
    AnswerBlock,
    BlockAssembler,
    BlockEvent,
    chat_request,
    refuse_fields,
    text_of,
)
from smelt.serve.server.chat_generation import ChatGeneration, prepare_chat, render_prompt
from smelt.serve.server.errors import ApiError
from smelt.serve.server.generation import Delta
from smelt.serve.server.schemas import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    ChatRequest,
    Stop,
    StrictModel,
    Text,
    example,
    register_fields,
)
from smelt.serve.server.service import Service
from smelt.serve.server.stream import Chunk, StreamFormat, named_event, respond
from smelt.serve.server.tools import parse_tools

router = APIRouter()
_PATH = "/v1/messages"
_STREAM = StreamFormat(
    encode=named_event,
    encode_error=lambda error: named_event(error.body_for(_PATH)),
    ping=named_event({"type": "ping"}),
    done=b"",
)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_UNSUPPORTED = {
    "mcp_servers": "this server calls no other servers; send their tools",
    "container": "this server runs no code",
}


class AnthropicMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]


class AnthropicTool(StrictModel):
    name: str
    type: Literal["custom"] | None = None
    description: Text | None = None
    input_schema: dict[str, Any]


class AnthropicToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    type: Literal["enabled", "disabled", "adaptive"]


class AnthropicOutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicOutputFormat | None = None


class CountTokensRequest(StrictModel):
    model_config = example(messages=[{"role": "user", "content": "Why is the sky blue?"}])
    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | list[dict[str, Any]] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    model_config = example(messages=[{"role": "user", "content": "Why is the sky blue?"}], max_tokens=64)
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None


register_fields(
    AnthropicMessage, AnthropicTool, AnthropicToolChoice, Thinking, AnthropicOutputFormat, OutputConfig, MessagesRequest
)


@router.post(_PATH)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer in Anthropic's Messages format."""
    service: Service = request.app.state.service
    chat = await prepare_chat(service, _translate(body), request.state.key)
    return await respond(request, chat.generation, _Writer(service, body, chat), body.stream, _STREAM)


@router.post(f"{_PATH}/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, int]:
    """Count the tokens of a request to /v1/messages."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    chat = _translate(body)
    text = await render_prompt(service, chat, parse_tools(chat, service.output_format))
    return {"input_tokens": len(await service.tokenizer.encode(text, special=False, param="messages"))}


def _translate(body: CountTokensRequest) -> ChatRequest:
    refuse_fields(body.model_extra or {}, _UNSUPPORTED)
    chat: list[dict[str, Any]] = []
    if body.system:
        chat.append({"role": "system", "content": text_of(body.system, ["text"], "system")})
    for index, message in enumerate(body.messages):
        chat += _translate_message(message, f"messages.{index}")
    fields: dict[str, Any] = {"model": body.model, "messages": chat, **_translate_tools(body)}
    if chat[-1]["role"] == "assistant":  # the beginning of the answer
        if "tool_calls" in chat[-1] or not chat[-1]["content"]:
            problem = "messages: the last one may be a text of the assistant, which the answer continues, but no calls."
            raise ApiError(400, problem, param="messages")
        fields["continue_final_message"] = True
    fields |= _translate_output(body)
    if isinstance(body, MessagesRequest):
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        fields |= {"stop": body.stop_sequences or None, **{name: getattr(body, name) for name in names}}
    return chat_request(fields)


def _translate_output(body: CountTokensRequest) -> dict[str, Any]:
    """Return the effort of reasoning and the format of the answer as chat completions name them."""
    fields: dict[str, Any] = {}
    config = body.output_config or OutputConfig()
    if config.effort is not None:
        fields["reasoning_effort"] = "xhigh" if config.effort == "max" else config.effort
    if body.thinking is not None and body.thinking.type == "disabled":
        fields["reasoning_effort"] = "none"
    elif body.thinking is not None:
        fields.setdefault("reasoning_effort", "medium")
    if config.format is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": config.format.schema_}}
    return fields


def _translate_tools(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [
            {"type": "function",
             "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}}
            for tool in body.tools
        ]  # fmt: skip
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _translate_message(message: AnthropicMessage, param: str) -> list[dict[str, Any]]:
    """Return chat messages: results of tools become messages of their own, before the text of the user."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, calls, reasoning = [], [], [], ""
    for block in message.content:
        block_type = block.get("type")
        if block_type == "tool_result" and message.role == "user":
            content = text_of(block.get("content") or "", ["text"], param)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif block_type == "tool_use" and message.role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif block_type == "thinking" and message.role == "assistant":
            reasoning += str(block.get("thinking") or "")
        elif block_type != "redacted_thinking":
            texts.append(text_of([block], ["text"], param))
    chat: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
    if calls:
        chat["tool_calls"] = calls
    if reasoning:
        chat["reasoning_content"] = reasoning
    return [*results, chat] if texts or calls or reasoning or not results else results


class _Writer:
    """Write the responses to one request."""

    def __init__(self, service: Service, body: MessagesRequest, chat: ChatGeneration) -> None:
        self.chat, self.blocks = chat, BlockAssembler()
        self.head = {
            "id": f"msg_{uuid.uuid4().hex[:24]}", "type": "message", "role": "assistant",
            "model": body.model or service.name,
        }  # fmt: skip

    def response(self, answers: list[Delta]) -> dict[str, Any]:
        delta = self.chat.parse(answers[0])
        self.blocks.add(delta.parts)
        content = [_complete_block(block) for block in self.blocks.blocks]
        return {**self.head, "content": content, **self._stop(delta.reason), "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[Chunk]:
        started = False
        async for deltas in self.chat.deltas():
            yield None
            for delta in deltas:
                if not started:
                    started = True
                    message: dict[str, Any] = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None}
                    yield {
                        "type": "message_start",
                        "message": {**message, "usage": {**self._usage(), "output_tokens": 0}},
                    }
                for event in self.blocks.add(delta.parts) + (self.blocks.finish() if delta.reason else []):
                    yield _stream_event(event)
                if delta.reason:
                    yield {"type": "message_delta", "delta": self._stop(delta.reason), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _stop(self, reason: str) -> dict[str, Any]:
        stopped = self.chat.generation.answers[0].text.stopped
        if stopped is not None and reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped}
        return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Count the tokens; those of the prompt without cached ones."""
        (prompt,), (answer,) = self.chat.generation.prompts, self.chat.generation.answers
        return {
            "input_tokens": len(prompt) - answer.cached, "output_tokens": answer.count,
            "cache_read_input_tokens": answer.cached, "cache_creation_input_tokens": 0,
        }  # fmt: skip


def _complete_block(block: AnswerBlock) -> dict[str, Any]:
    empty = _empty_block(block)
    if block.type == "call":
        return {**empty, "input": _parse_arguments(block.text)}
    return {**empty, "text" if block.type == "text" else "thinking": block.text}


def _parse_arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):  # the answer was cut off
        return {}


def _empty_block(block: AnswerBlock) -> dict[str, Any]:
    if block.type == "call":
        return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": {}}
    return (
        {"type": "text", "text": ""} if block.type == "text" else {"type": "thinking", "thinking": "", "signature": ""}
    )


def _stream_event(event: BlockEvent) -> dict[str, Any]:
    block = event.block
    if event.event == "start":
        return {"type": "content_block_start", "index": block.index, "content_block": _empty_block(block)}
    if event.event == "end":
        return {"type": "content_block_stop", "index": block.index}
    kinds = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
             "call": ("input_json_delta", "partial_json")}  # fmt: skip
    delta_type, key = kinds[block.type]
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": delta_type, key: event.text}}
