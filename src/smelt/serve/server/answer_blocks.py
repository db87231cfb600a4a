"""What Anthropic's API and OpenAI's Responses share: answers that are lists of blocks (texts, reasoning and calls), and
the translation to chat requests.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from smelt.serve.server.errors import ApiError
from smelt.serve.server.parsers.base import CallArguments, CallStart, Content, Part
from smelt.serve.server.schemas import ChatRequest


@dataclass
class AnswerBlock:
    """A text, a reasoning, or the arguments of a call with its function's name."""

    type: Literal["text", "reasoning", "call"]
    index: int
    id: str  # a random part of ids
    text: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of a text, if the writer adds them


class BlockEvent(NamedTuple):
    event: Literal["start", "delta", "end"]
    block: AnswerBlock
    text: str = ""


class BlockAssembler:
    """The blocks of one answer so far."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._open = False

    def add(self, parts: Iterable[Part]) -> list[BlockEvent]:
        """Return what new parts begin, add and end."""
        events: list[BlockEvent] = []
        for part in parts:
            block_type = _block_type(part)
            begins = isinstance(part, CallStart) or not self._open or self.blocks[-1].type != block_type
            if begins:
                events += self.finish()
                name = part.name if isinstance(part, CallStart) else ""
                self.blocks.append(AnswerBlock(block_type, len(self.blocks), uuid.uuid4().hex[:24], name=name))
                self._open = True
                events.append(BlockEvent("start", self.blocks[-1]))
            if not isinstance(part, CallStart):
                self.blocks[-1].text += part.text
                events.append(BlockEvent("delta", self.blocks[-1], part.text))
        return events

    def finish(self) -> list[BlockEvent]:
        """End the last block."""
        events = [BlockEvent("end", self.blocks[-1])] if self._open else []
        self._open = False
        return events


def _block_type(part: Part) -> Literal["text", "reasoning", "call"]:
    if isinstance(part, CallStart | CallArguments):
        return "call"
    return "text" if isinstance(part, Content) else "reasoning"


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """Build a chat request from the translated fields of another API."""
    try:
        return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise ApiError(400, f"the request cannot be translated to a chat: {first['msg'][:200]}.") from error


def text_of(content: Any, types: Sequence[str], param: str) -> str:
    """Return the text of content that is a string, or a list of parts of these types."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{param}: the content must be a string or a list.", param=param)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in types or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{param}: this server reads text only.", param=param, code="unsupported")
        texts.append(part["text"])
    return "".join(texts)


def refuse_fields(fields: dict[str, Any], reasons: dict[str, str]) -> None:
    """Refuse fields that would change the answer and are not supported."""
    for name, reason in reasons.items():
        if fields.get(name) not in (None, False, "", [], {}):
            raise ApiError(400, f"{name}: {reason}.", param=name, code="unsupported")
