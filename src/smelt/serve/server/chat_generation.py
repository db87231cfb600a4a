"""Generate the answers to a conversation: what all chat APIs share. Each translates its requests to a ChatRequest, and
writes the parsed answers in its own format.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from smelt.serve.server.beam_generation import create_generation
from smelt.serve.server.errors import ApiError
from smelt.serve.server.generation import (
    Delta,
    Generation,
    build_sampling_params,
    check_generation,
    truncate_prompt,
)
from smelt.serve.server.parsers import OutputParser
from smelt.serve.server.parsers.base import CallArguments, CallStart, Content, Part, Reasoning
from smelt.serve.server.schemas import ChatRequest
from smelt.serve.server.service import Service
from smelt.serve.server.tools import ChatTools, constrain, parse_tools, template_messages, template_variables

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own: it marks the end of the message to continue
MAX_TEMPLATE_KWARGS = 4096
_RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class ChatAnswer:
    """A parsed answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, part: Part) -> None:
        if isinstance(part, Content):
            self.content += part.text
        elif isinstance(part, Reasoning):
            self.reasoning += part.text
        elif isinstance(part, CallStart):
            self.calls.append(Call(f"call_{uuid.uuid4().hex[:24]}", part.name))
        else:
            self.calls[-1].arguments += part.text


@dataclass
class ChatDelta:
    """The new part of one answer: its text, tokens and log-probabilities in `raw`, its parsed text in `parts`."""

    raw: Delta
    parts: list[Part]
    reason: str  # as in OpenAI's API: stop, length, tool_calls; empty before the end


class ChatGeneration:
    """A chat request in progress. `answers` are the parsed answers so far."""

    def __init__(self, generation: Generation, parsers: list[OutputParser], parallel: bool) -> None:
        self.generation, self._parsers, self._parallel = generation, parsers, parallel
        self.answers = [ChatAnswer() for _ in parsers]

    async def deltas(self) -> AsyncGenerator[list[ChatDelta], None]:
        """Yield new deltas as they arrive; an empty list after a long silence."""
        async with aclosing(self.generation.deltas()) as updates:
            async for deltas in updates:
                yield [self.parse(delta) for delta in deltas]

    def parse(self, delta: Delta) -> ChatDelta:
        """Parse new text of an answer."""
        parser, answer = self._parsers[delta.index], self.answers[delta.index]
        found = parser.feed(delta.text) + (parser.finish() if delta.reason else [])
        parts: list[Part] = []
        for part in found:
            called = isinstance(part, CallStart | CallArguments)
            if called and not self._parallel and len(answer.calls) > int(not isinstance(part, CallStart)):
                continue
            answer.add(part)
            parts.append(part)
        reason = "tool_calls" if delta.reason == "stop" and answer.calls else delta.reason
        return ChatDelta(delta, parts, reason)


async def prepare_chat(service: Service, body: ChatRequest, key: bytes) -> ChatGeneration:
    """Check a request, render and tokenize its messages, and return its generation, which has not started."""
    check_generation(service, body)
    output_format = service.output_format
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs to be true.", param="top_logprobs")
    tools = parse_tools(body, output_format)
    sampling = build_sampling_params(
        body, max_tokens=body.token_limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None, prompt_logprobs=body.prompt_logprobs,
        vocab_size=service.vocab_size,
    )  # fmt: skip
    text = await render_prompt(service, body, tools)
    sampling = constrain(sampling, tools, output_format, text)
    special = bool(body.add_special_tokens)
    tokens = await service.tokenizer.encode(text, special=special, param="messages")
    prompt = truncate_prompt(tokens, body, service, sampling)
    markers: Collection[int] = output_format.tokens.values()
    generation = create_generation(service, [prompt], body, sampling, key, markers)
    if tools.forced:
        generation.constraint_param = "tools"
    parsers = [output_format.parser(tools.names, text, tools.forced) for _ in generation.answers]
    return ChatGeneration(generation, parsers, body.parallel_tool_calls is not False)


async def render_prompt(service: Service, body: ChatRequest, tools: ChatTools) -> str:
    """Apply the chat template to the messages and tools of a request."""
    output_format = service.output_format
    messages = template_messages(body.messages, tools, output_format)
    described = tools.tools if output_format.template_has_tools else None
    variables = {**template_variables(body), **_template_kwargs(body)}
    if not body.continue_final_message:
        variables["add_generation_prompt"] = body.add_generation_prompt is not False
        return await service.tokenizer.render_chat(messages, described, **variables)
    variables["add_generation_prompt"] = False
    content = messages[-1].get("content")
    if body.add_generation_prompt or not isinstance(content, str):
        other = "add_generation_prompt" if body.add_generation_prompt else "a last message without text"
        message = f"continue_final_message: it cannot be combined with {other}."
        raise ApiError(400, message, param="continue_final_message")
    marked = [*messages[:-1], {**messages[-1], "content": content + CONTINUE_TAG}]
    return _cut_at_tag(await service.tokenizer.render_chat(marked, described, **variables), content)


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """Return the arguments of a request for the chat template: few and small, since they are rendered."""
    kwargs = body.chat_template_kwargs or {}
    param = "chat_template_kwargs"
    if len(json.dumps(kwargs)) > MAX_TEMPLATE_KWARGS:
        message = f"{param}: as JSON they may have at most {MAX_TEMPLATE_KWARGS:,} characters."
        raise ApiError(400, message, param=param)
    if any(not _VARIABLE.fullmatch(name) or name in _RESERVED_VARIABLES for name in kwargs):
        reserved = ", ".join(sorted(_RESERVED_VARIABLES))
        raise ApiError(400, f"{param}: names must be identifiers, and none of {reserved}.", param=param)
    return kwargs


def _cut_at_tag(text: str, content: str) -> str:
    """Return a rendered conversation up to the end of its last message, as transformers does."""
    position = text.rfind(CONTINUE_TAG.strip())
    if position < 0 or content.strip() not in text:
        message = "continue_final_message: the model's chat template changes the last message, or leaves it out."
        raise ApiError(400, message, param="continue_final_message")
    trimmed = text[position : position + len(CONTINUE_TAG)] != CONTINUE_TAG  # the template strips messages
    return text[:position].rstrip() if trimmed else text[:position]
