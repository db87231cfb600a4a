"""The OpenAI client of the load test: find the model, count tokens, stream one completion as its timeline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from smelt.errors import RequestError
from smelt.loadtest.http import Address, ExchangeError, Reply, exchange
from smelt.loadtest.prompts import Prompt
from smelt.loadtest.timeline import RequestTimeline


@dataclass(frozen=True)
class Endpoint:
    """Where and how completions are requested."""

    address: Address
    model: str
    chat: bool = False
    key: str = ""
    ignore_eos: bool = True  # generate the full length
    temperature: float = 0.0
    seconds: float = 600.0  # timeout of a request

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: Prompt) -> dict[str, Any]:
        content: dict[str, Any] = {"messages": prompt.messages} if self.chat else {"prompt": prompt.content}
        fixed = {"ignore_eos": True} if self.ignore_eos else {}
        return {
            "model": self.model, **content, "max_tokens": prompt.output, "temperature": self.temperature,
            "stream": True, "stream_options": {"include_usage": True}, **fixed,
        }  # fmt: skip


async def complete(endpoint: Endpoint, prompt: Prompt, clock: Callable[[], float], due: float = 0.0) -> RequestTimeline:
    """Send one request and record its timeline. Failures of the server are recorded, not raised."""
    line = RequestTimeline(due=due, sent=clock())
    try:
        async with asyncio.timeout(endpoint.seconds):
            async with exchange(endpoint.address, endpoint.path, endpoint.body(prompt), endpoint.key) as reply:
                if reply.status != 200:
                    raise ExchangeError(f"status {reply.status}", error_message(await reply.json()))
                await _follow(reply, line, clock)
    except ExchangeError as error:
        line.failure, line.detail, line.ended = error.reason, error.detail, clock()
    except TimeoutError:
        line.failure, line.ended = "timed out", clock()
    return line


async def _follow(reply: Reply, line: RequestTimeline, clock: Callable[[], float]) -> None:
    """Record when each chunk of text arrives, until the stream is done."""
    async for data in _events(reply):
        now = clock()
        if data.get("error"):
            raise ExchangeError("error in the stream", error_message(data))
        usage = data.get("usage")
        if isinstance(usage, dict):
            line.input_tokens = _count(usage.get("prompt_tokens"))
            line.output_tokens = _count(usage.get("completion_tokens"))
        choices = data.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            if _has_text(choices[0]):
                line.chunk_times.append(now)
                line.ended = now
            elif choices[0].get("finish_reason"):
                line.ended = now
    if not line.ended or (not line.chunk_times and not line.output_tokens):
        raise ExchangeError("empty answer", "no token arrived")
    line.chunk_times = line.chunk_times or [line.ended]  # tokens without text
    line.output_tokens = line.output_tokens or len(line.chunk_times)  # a server that does not report usage


async def _events(reply: Reply) -> AsyncIterator[dict[str, Any]]:
    async for text in reply.lines():
        if not text.startswith(b"data:"):
            continue
        text = text[5:].strip()
        if text == b"[DONE]":
            return
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ExchangeError("not understood", "an event of the stream is not JSON") from error
        if isinstance(data, dict):
            yield data
    raise ExchangeError("cut off", "the stream ended without [DONE]")


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))
    return bool(choice.get("text"))


def error_message(content: Any) -> str:
    """Extract the message of an error response, in any of the usual shapes."""
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return content if isinstance(content, str) else ""


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


async def fetch_json(address: Address, path: str, content: Any = None, key: str = "") -> tuple[int, Any]:
    """Return status and JSON; raise RequestError if the server does not answer."""
    try:
        async with exchange(address, path, content, key) as reply:
            return reply.status, await reply.json()
    except ExchangeError as error:
        raise RequestError(
            f"{address} does not answer ({error.reason}: {error.detail or 'no reason given'})."
        ) from None


async def find_model(address: Address, name: str | None, key: str = "") -> str:
    """Return the model to use: the one named, if the server has it, otherwise the first it lists."""
    status, content = await fetch_json(address, "/v1/models", key=key)
    if status in (401, 403):
        raise RequestError(refusal(address, status))
    listed = content.get("data") if status == 200 and isinstance(content, dict) else None
    names = [str(entry["id"]) for entry in listed or [] if isinstance(entry, dict) and "id" in entry]
    if name is not None and (name in names or not names):
        return name
    if not names:
        raise RequestError(f"{address} lists no model (status {status} for /v1/models); name one with --model.")
    if name is not None:
        raise RequestError(f"{address} has no model {name!r:.80}; it has {', '.join(names)[:200]}.")
    return names[0]


def refusal(address: Address, status: int, detail: str = "") -> str:
    """Explain an error status."""
    reason = f" ({detail.rstrip('.')})" if detail else ""
    if status in (401, 403):
        return f"{address} requires an API key (status {status}); pass its file with --api-key-file."
    if status == 404:
        return f"{address} has no such model or no such route (status 404){reason}; see --model and --chat."
    return f"{address} answered with status {status}{reason}."


async def truncate_to_tokens(address: Address, model: str, prompts: list[Prompt], key: str = "") -> list[Prompt] | None:
    """Truncate prompts to as many tokens as they have words, if the server has /tokenize as vLLM and Smelt do."""
    truncated = []
    for prompt in prompts:
        length = len(str(prompt.content).split())
        content = {"model": model, "prompt": prompt.content, "add_special_tokens": False}
        status, answer = await fetch_json(address, "/tokenize", content, key)
        tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens) or len(tokens) < length:
            return None
        truncated.append(replace(prompt, content=tokens[:length]))
    return truncated
