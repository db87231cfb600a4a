"""A service with a fake engine process: silence, timeouts, and the fast path to text."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import pytest

from smelt.serve.server import generation, stream
from smelt.serve.server.app import create_app
from smelt.serve.server.errors import ApiError
from smelt.serve.server.generation import PING_SECONDS
from smelt.serve.server.service import Service
from smelt.serve.server.settings import ServerLimits, ServerSettings
from smelt.serve.server.tokenization import AsyncTokenizer, _FastDecoder
from smelt.serve.worker.client import EngineClient, TokenEvent, TokenStream
from tests.character_tokenizer import character_tokenizer
from tests.serve.fake_engine import fake_engine_command
from tests.serve.server_process import tokenizer


class Clock:
    """Stand in for the module `time`: time passes only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (generation, stream):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now


def post_to_service(model_folder: Path, path: str, body: dict[str, Any]) -> httpx.Response:
    """Return the answer of a service that serves nothing else."""

    async def main() -> httpx.Response:
        service = Service(ServerSettings(str(model_folder)))
        await service.start()
        transport = httpx.ASGITransport(create_app(service))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.post(f"/v1/{path}", json=body)
        await service.stop()
        return response

    return asyncio.run(main())


def test_a_silent_engine(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A streaming client receives pings; after the timeout both clients get an error."""
    monkeypatch.setattr(EngineClient, "command", fake_engine_command("ready()\nwhile True: pipe.receive()"))
    clock = Clock(monkeypatch)

    async def time_out(self: TokenStream, timeout: float) -> list[TokenEvent]:
        clock.now += timeout
        return []

    monkeypatch.setattr(TokenStream, "next", time_out)

    async def main() -> list[httpx.Response]:
        service = Service(ServerSettings(str(model_folder), limits=ServerLimits(request_timeout=2.5 * PING_SECONDS)))
        await service.start()
        transport = httpx.ASGITransport(create_app(service))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            bodies: list[dict[str, Any]] = [{"prompt": "x", "stream": stream} for stream in (True, False)]
            responses = [await client.post("/v1/completions", json=body) for body in bodies]
        assert service.admission.admitted == 0 and service.metrics.finished.values["abort"] == 2
        service.admission.close()
        assert service.unhealthy_reason == "the server is shutting down."
        await service.stop()
        return responses

    streamed, complete = asyncio.run(main())
    *pings, error, done = [line for line in streamed.text.split("\n\n") if line]
    assert pings == [": still here"] * 2 and done == "data: [DONE]"
    for error_body in (json.loads(error.removeprefix("data: ")), complete.json()):
        assert f"longer than {2.5 * PING_SECONDS:g} seconds" in error_body["error"]["message"]
    assert complete.status_code == 504


@pytest.mark.parametrize(
    ("path", "body", "num_chunks"),
    [("completions", {"prompt": [1]}, 1), ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 2)],
)
def test_tokens_without_visible_text(
    path: str, body: dict[str, Any], num_chunks: int, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held back as a possible stop string: the engine is working, but its client sees nothing for a while.

    A token arrives every 0.4 times the ping interval, so that every third brings a ping; a chat begins with its role.
    """
    tokens = tokenizer()("stopstopsto")["input_ids"]
    script = f"""
ready()
while True:
    request_id = pipe.receive().request_id
    for index, token in enumerate({tokens}):
        end = "length" if index == {len(tokens) - 1} else ""
        pipe.send(StepOutput(state, [SampledToken(request_id, 0, token, None, end, 0, 0.0)]))
"""
    monkeypatch.setattr(EngineClient, "command", fake_engine_command(script))
    clock, next_events, events = Clock(monkeypatch), TokenStream.next, deque[TokenEvent]()

    async def next_token(self: TokenStream, timeout: float) -> list[TokenEvent]:
        if not events:
            events.extend(await next_events(self))
        clock.now += 0.4 * PING_SECONDS
        return [events.popleft()]

    monkeypatch.setattr(TokenStream, "next", next_token)

    body = {**body, "max_tokens": 20, "stop": "stopstopstop", "stream": True}
    parts = [line for line in post_to_service(model_folder, path, body).text.split("\n\n") if line]
    assert parts[-1] == "data: [DONE]" and "stopstopsto" in parts[-2]
    assert parts.count(": still here") == len(tokens) // 3 == 3 and len(parts) == 3 + num_chunks + 1


@pytest.mark.parametrize(
    ("stop", "text", "reason", "count"), [(None, "abcSTOPdef", "length", 10), ("STOP", "abc", "stop", 7)]
)
def test_several_tokens_in_one_message(
    stop: str | None, text: str, reason: str, count: int, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one message: they are decoded as one chunk, and text after a stop string is neither shown nor counted."""
    tokens = tokenizer()("abcSTOPdef")["input_ids"]
    script = f"""
ready()
while True:
    request_id = pipe.receive().request_id
    ends = [""] * {len(tokens) - 1} + ["length"]
    sampled = [SampledToken(request_id, 0, token, None, end, 0, 0.0) for token, end in zip({tokens}, ends)]
    pipe.send(StepOutput(state, sampled))
"""
    monkeypatch.setattr(EngineClient, "command", fake_engine_command(script))

    answer = post_to_service(model_folder, "completions", {"prompt": [1], "max_tokens": 20, "stop": stop}).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == (text, reason, count)


@pytest.mark.parametrize("each", [tokenizer(), character_tokenizer()], ids=["bytes", "characters"])
def test_the_fast_path_gives_the_same_text(each: Any) -> None:
    texts = AsyncTokenizer(each, 100)
    assert isinstance(texts._decoder, _FastDecoder)
    for tokens in ([1, 2, 3], [98, 5, 5, 200 % len(each), len(each) - 1], list(range(len(each)))):
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        assert texts._decoder.decode(tokens, **options) == each.decode(tokens, **options)

    class Own(type(each)):  # type: ignore[misc]
        def decode(self, *arguments: Any, **more: Any) -> str:
            return "mine"

    subclassed = Own(tokenizer_object=each.backend_tokenizer)
    assert AsyncTokenizer(subclassed, 100)._decoder is subclassed


def test_bytes_of_tokens() -> None:
    """Also for tokens that are only a part of a character."""
    texts = AsyncTokenizer(tokenizer(), 100)
    ids = tokenizer()("é🙂a")["input_ids"]
    assert b"".join(texts.token(token)[1] for token in ids) == "é🙂a".encode()
    assert texts.token(ids[-1]) == ("a", b"a") and texts.token(256) == ("<end>", b"<end>")


def test_the_server_starts_without_importing_torch() -> None:
    """The engine's process imports torch; importing it here would delay every start by seconds."""
    code = "import sys, smelt.cli.serve, smelt.serve.server.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_has_several_names() -> None:
    service = Service(ServerSettings("folder/small", name="small, gpt-4o-mini,small,", adapters={"poet": "x"}))
    assert service.names == ["small", "gpt-4o-mini", "poet"] and service.name == "small"
    service.check_model("gpt-4o-mini")
    assert service.adapter_name("gpt-4o-mini") is None
    with pytest.raises(ApiError, match=r"serves small, gpt-4o-mini, poet"):
        service.check_model("gpt-4o")
    assert Service(ServerSettings("folder/small")).names == ["small"]
