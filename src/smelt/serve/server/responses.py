"""POST /v1/responses: OpenAI's Responses, translated to a chat request. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from smelt.serve.engine.sampling_params import MAX_LOGPROBS
from smelt.serve.server.answer_blocks import (
    AnswerBlock,
    BlockAssembler,
    BlockEvent,
    chat_request,
    refuse_fields,
    text_of,
)
from smelt.serve.server.chat_generation import ChatDelta, ChatGeneration, prepare_chat
from smelt.serve.server.errors import ApiError
from smelt.serve.server.generation import Delta, logprobs_body
from smelt.serve.server.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    FunctionName,
    StrictModel,
    Text,
    example,
    extras,
    register_fields,
)
from smelt.serve.server.service import Service
from smelt.serve.server.stream import Chunk, StreamFormat, named_event, respond
from smelt.serve.server.unsupported import check_fields

router = APIRouter()
_STREAM = StreamFormat(
    encode=named_event,
    encode_error=lambda error: named_event({"type": "error", **error.body["error"]}),
    done=b"",
)
_TEXT_TYPES = ("input_text", "output_text", "text")
_UNSUPPORTED = {
    "previous_response_id": "responses are not stored; send the whole conversation as input",
    "conversation": "conversations are not stored; send the whole conversation as input",
    "store": "responses are not stored; leave it out, and send the whole conversation as input",
    "background": "responses are not stored, so that a client must wait for them",
    "prompt": "there are no stored prompts; send input",
    "max_tool_calls": "this server calls no tools itself",
}


_LOGPROBS = "message.output_text.logprobs"  # of `include`
# Fields of chat completions that vLLM takes here, too.
_SAMPLING_FIELDS = (
    "top_k", "min_p", "seed", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words", "priority", "cache_salt",
    "chat_template_kwargs", "structured_outputs",
)  # fmt: skip
_HARMLESS = ("stream_options", "client_metadata")


class ResponsesTool(StrictModel):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(StrictModel):
    type: Literal["function"]
    name: FunctionName


class ReasoningOptions(StrictModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None


class TextOptions(StrictModel):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(StrictModel):
    model_config = example(input="Why is the sky blue?", max_output_tokens=64)
    model: str | None = None
    input: Text | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    include: Annotated[list[str], Field(max_length=16)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


register_fields(ResponsesTool, ResponsesToolChoice, ReasoningOptions, TextOptions, ResponsesRequest)


@router.post("/responses", include_in_schema=False)
@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer in OpenAI's Responses format; nothing is stored."""
    service: Service = request.app.state.service
    chat = await prepare_chat(service, _translate(body), request.state.key)
    return await respond(request, chat.generation, _Writer(service, body, chat), body.stream, _STREAM)


def _translate(body: ResponsesRequest) -> ChatRequest:
    more = extras(body)
    refuse_fields(more, _UNSUPPORTED)
    sampling = {name: more.pop(name) for name in _SAMPLING_FIELDS if name in more}
    for name in (*_UNSUPPORTED, *_HARMLESS):
        more.pop(name, None)
    check_fields(body)
    if body.truncation == "auto":
        raise ApiError(400, "truncation: prompts are not cut; send a shorter one.", param="truncation")
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for index, item in enumerate(items):
        _add_item(messages, item, f"input.{index}")
    fields: dict[str, Any] = {
        "model": body.model, "messages": messages, "parallel_tool_calls": body.parallel_tool_calls,
        "max_completion_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "response_format": _response_format(body), "tool_choice": body.tool_choice, "stream": body.stream, **sampling,
    }  # fmt: skip
    if _LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        fields["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools]
    if isinstance(body.tool_choice, ResponsesToolChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    return chat_request(fields)


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """Return the format of the text as chat completions name it."""
    text_format = body.text.format if body.text is not None else None
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    return {
        "type": "json_schema",
        "json_schema": {name: text_format.get(name) for name in ("name", "schema", "strict")},
    }


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], param: str) -> None:
    """Add an item of the conversation. Reasoning, text and calls of one turn become one message of the assistant."""
    item_type = item.get("type") or "message"
    if item_type == "function_call_output":
        output = text_of(item.get("output"), _TEXT_TYPES, param)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        return
    role = item.get("role") if item_type == "message" else "assistant"
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == "assistant" and not (item_type == "message" and last.get("content")):
        message = last
    else:
        message = {"role": role, "content": ""}
        messages.append(message)
    if item_type == "message":
        message["content"] = text_of(item.get("content"), _TEXT_TYPES, param)
    elif item_type == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        message.setdefault("tool_calls", []).append(
            {"id": item.get("call_id"), "type": "function", "function": function}
        )
    elif item_type == "reasoning":
        message["reasoning_content"] = text_of(item.get("content") or [], ("reasoning_text",), param)
    else:
        problem = f"{param}: items are messages, function_call, function_call_output and reasoning."
        raise ApiError(400, problem, param=param, code="unsupported")


class _Writer:
    """Write the responses to one request."""

    def __init__(self, service: Service, body: ResponsesRequest, chat: ChatGeneration) -> None:
        self.tokenizer, self.chat, self.blocks, self._events = service.tokenizer, chat, BlockAssembler(), 0
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is held back
        settings = body.model_dump(
            include={"instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice", "text"}
        )
        self.head = {
            **settings,
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "error": None,
            "model": body.model or service.name, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tools": settings["tools"] or [], "tool_choice": settings["tool_choice"] or "auto",
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p, "metadata": body.metadata or {},
            "text": settings["text"] or {"format": {"type": "text"}}, "truncation": "disabled", "store": False,
            "previous_response_id": None, "background": False, "incomplete_details": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        }  # fmt: skip

    def response(self, answers: list[Delta]) -> dict[str, Any]:
        delta = self.chat.parse(answers[0])
        self._add(delta)
        return self._response(delta.reason)

    async def chunks(self) -> AsyncIterator[Chunk]:
        started, reason = False, ""
        async for deltas in self.chat.deltas():
            yield None
            for delta in deltas:
                if not started:
                    started = True
                    for state in ("created", "in_progress"):
                        yield self._event(f"response.{state}", response=self._response(""))
                reason = delta.reason
                for event, logprobs in self._add(delta):
                    for content in _stream_events(event, logprobs):
                        yield self._event(**content)
        state = "incomplete" if reason == "length" else "completed"
        yield self._event(f"response.{state}", response=self._response(reason))

    def _add(self, delta: ChatDelta) -> list[tuple[BlockEvent, list[dict[str, Any]]]]:
        """Return what a delta begins, adds and ends, each with new log-probabilities: with those of text that was held
        back before, but not of reasoning and calls.
        """
        self._logprobs += logprobs_body(self.tokenizer, delta.raw.logprobs)
        events: list[tuple[BlockEvent, list[dict[str, Any]]]] = []
        for event in self.blocks.add(delta.parts) + (self.blocks.finish() if delta.reason else []):
            new: list[dict[str, Any]] = []
            if event.event == "delta":
                new, self._logprobs = self._logprobs if event.block.type == "text" else [], []
                event.block.logprobs += new
            events.append((event, new))
        return events

    def _event(self, type: str, **content: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": type, "sequence_number": self._events - 1, **content}

    def _response(self, reason: str) -> dict[str, Any]:
        """Return the response so far; without a reason it is in progress."""
        cut = reason == "length"
        status = "incomplete" if cut else "completed" if reason else "in_progress"
        output = [_item(block, status) for block in self.blocks.blocks]
        details = {"reason": "max_output_tokens"} if cut else None
        usage = self._usage() if reason else None
        return {**self.head, "status": status, "output": output, "incomplete_details": details, "usage": usage}

    def _usage(self) -> dict[str, Any]:
        (prompt,), (answer,) = self.chat.generation.prompts, self.chat.generation.answers
        return {
            "input_tokens": len(prompt), "input_tokens_details": {"cached_tokens": answer.cached},
            "output_tokens": answer.count, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(prompt) + answer.count,
        }  # fmt: skip


def _item(block: AnswerBlock, status: str) -> dict[str, Any]:
    if block.type == "call":
        return {
            "id": f"fc_{block.id}", "type": "function_call", "call_id": f"call_{block.id}", "name": block.name,
            "arguments": block.text, "status": status,
        }  # fmt: skip
    content = [_content_part(block, block.text)] if block.text else []
    if block.type == "text":
        return {"id": f"msg_{block.id}", "type": "message", "role": "assistant", "content": content, "status": status}
    return {"id": f"rs_{block.id}", "type": "reasoning", "summary": [], "content": content, "status": status}


def _content_part(block: AnswerBlock, text: str) -> dict[str, Any]:
    if block.type == "text":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": block.logprobs if text else []}
    return {"type": "reasoning_text", "text": text}


def _stream_events(event: BlockEvent, new_logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a part of an item, by their types."""
    block = event.block
    item = _item(block, "completed" if event.event == "end" else "in_progress")
    place: dict[str, Any] = {"output_index": block.index}
    within = {**place, "item_id": item["id"]}
    if block.type != "call":
        within["content_index"] = 0
    names = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
    name = f"response.{names[block.type]}"
    shown = new_logprobs if event.event == "delta" else block.logprobs
    logprobs: dict[str, Any] = {"logprobs": shown} if block.type == "text" else {}
    if event.event == "delta":
        return [{"type": f"{name}.delta", **within, "delta": event.text, **logprobs}]
    if event.event == "start":  # the block may have text already, which the next event has
        item = _item(replace(block, text="", logprobs=[]), "in_progress")
        events = [{"type": "response.output_item.added", **place, "item": item}]
        if block.type != "call":
            events.append({"type": "response.content_part.added", **within, "part": _content_part(block, "")})
        return events
    ended = {"type": "response.output_item.done", **place, "item": item}
    if block.type == "call":
        return [{"type": f"{name}.done", **within, "name": block.name, "arguments": block.text}, ended]
    return [
        {"type": f"{name}.done", **within, "text": block.text, **logprobs},
        {"type": "response.content_part.done", **within, "part": _content_part(block, block.text)},
        ended,
    ]
