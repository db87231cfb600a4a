"""One streamed completion, as its timeline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smelt.loadtest.http import Address, Failed, Reply, exchange
from smelt.loadtest.prompts import Prompt
from smelt.loadtest.timeline import Timeline


@dataclass(frozen=True)
class Endpoint:
    """Where and how completions are asked for."""

    address: Address
    model: str
    chat: bool = False
    key: str = ""
    ignore_end: bool = True  # the answer gets its full length, whatever the model says
    temperature: float = 0.0
    seconds: float = 600.0  # that a request may take

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: Prompt) -> dict[str, Any]:
        asked: dict[str, Any] = {"messages": prompt.messages} if self.chat else {"prompt": prompt.content}
        fixed = {"ignore_eos": True} if self.ignore_end else {}
        return {
            "model": self.model, **asked, "max_tokens": prompt.output, "temperature": self.temperature,
            "stream": True, "stream_options": {"include_usage": True}, **fixed,
        }  # fmt: skip


async def complete(endpoint: Endpoint, prompt: Prompt, clock: Callable[[], float], due: float = 0.0) -> Timeline:
    """Send it and follow the answer. Nothing that the server does is an exception here."""
    line = Timeline(due=due, sent=clock())
    try:
        async with asyncio.timeout(endpoint.seconds):
            async with exchange(endpoint.address, endpoint.path, endpoint.body(prompt), endpoint.key) as reply:
                if reply.status != 200:
                    raise Failed(f"status {reply.status}", error_words(await reply.json()))
                await _follow(reply, line, clock)
    except Failed as failed:
        line.failure, line.detail, line.ended = failed.kind, failed.detail, clock()
    except TimeoutError:
        line.failure, line.ended = "timed out", clock()
    return line


async def _follow(reply: Reply, line: Timeline, clock: Callable[[], float]) -> None:
    """Note when each piece of text comes, until the stream says that it is done."""
    async for data in _events(reply):
        now = clock()
        if data.get("error"):
            raise Failed("error in the stream", error_words(data))
        usage = data.get("usage")
        if isinstance(usage, dict):
            line.input_tokens = _count(usage.get("prompt_tokens"))
            line.output_tokens = _count(usage.get("completion_tokens"))
        choices = data.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            if _has_text(choices[0]):
                line.pieces.append(now)
                line.ended = now
            elif choices[0].get("finish_reason"):
                line.ended = now
    if not line.ended or (not line.pieces and not line.output_tokens):
        raise Failed("empty answer", "no token came")
    line.pieces = line.pieces or [line.ended]  # tokens that have no text
    line.output_tokens = line.output_tokens or len(line.pieces)  # a server that does not count


async def _events(reply: Reply) -> Any:
    async for text in reply.lines():
        if not text.startswith(b"data:"):
            continue
        text = text[5:].strip()
        if text == b"[DONE]":
            return
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Failed("not understood", "an event of the stream is not JSON") from error
        if isinstance(data, dict):
            yield data
    raise Failed("cut off", "the stream ended without [DONE]")


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))
    return bool(choice.get("text"))


def error_words(content: Any) -> str:
    """What a server says about an error, in any of the usual shapes."""
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return content if isinstance(content, str) else ""


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
