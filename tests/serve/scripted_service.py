"""A service whose engine, a process of its own, answers with texts that the test supplies, a token per step."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from smelt.serve.server.app import create_app
from smelt.serve.server.service import Service
from smelt.serve.server.settings import ServerSettings
from smelt.serve.worker.client import EngineClient
from tests.serve.fake_engine import fake_engine_command
from tests.serve.server_process import language_model, tokenizer

# Every tag in one template, which passes all that a template may get.
HEAD = "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
TEMPLATES = {
    "hermes": HEAD + "{# <tool_call> <think> </think> #}assistant:{% if enable_thinking %}<think>\n{% endif %}",
    "mistral": HEAD + "{# [TOOL_CALLS] #}assistant:",
    "openai": HEAD + "{# <|start|><|channel|><|message|> developer {{ reasoning_effort }} #}<|start|>assistant",
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
}
MARKERS = {
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "openai": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"],
}
_SCRIPT = """
import time
from dataclasses import replace
pipe.send(EngineReady(folder=start.model, max_model_len=8192, max_request_tokens=8192, vocab_size={vocab_size},
                      backend="none", blocks=8, block_size=16, state=state))
answers = {answers}
while True:
    message = pipe.receive()
    if not isinstance(message, SubmitRequest):
        continue
    if message.sampling["structured_output"]:
        pipe.send(RequestAccepted(message.request_id))
    tokens, reason = answers.pop(0)
    for index, token in enumerate(tokens):
        time.sleep({pause})
        end = reason if index == len(tokens) - 1 else ""
        for sample in range(message.sampling["n"]):
            pipe.send(StepOutput(state, [(message.request_id, sample, token, None, end, 0, 0.0)]))
"""


def write_tokenizer(folder: Path, name: str) -> Path:
    """Write a folder with the tokenizer and chat template of a format."""
    bytewise = tokenizer()
    bytewise.chat_template = TEMPLATES[name]
    if name in MARKERS:
        bytewise.add_special_tokens({"additional_special_tokens": MARKERS[name]})
    bytewise.save_pretrained(folder)
    _network().config.save_pretrained(folder)
    return folder


@cache
def _network() -> Any:
    return language_model()


@asynccontextmanager
async def scripted_app(
    folder: Path, answers: Sequence[str | tuple[str, str]], pause: float = 0, **settings: Any
) -> AsyncIterator[Callable[..., Any]]:
    """Yield an application in whose engine the requests get these answers in turn: a text, or a text and the reason of
    its end. `pause` are the seconds before each token.
    """
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(folder)
    pairs = [(answer, "stop") if isinstance(answer, str) else answer for answer in answers]
    encoded = [(loaded(text, add_special_tokens=False)["input_ids"] or [256], reason) for text, reason in pairs]
    script = _SCRIPT.format(vocab_size=len(loaded), answers=encoded, pause=pause)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineClient, "command", fake_engine_command(script))
        service = Service(ServerSettings(str(folder), name="tiny", **settings))
        await service.start()
    try:
        yield create_app(service)
    finally:
        await service.stop()


def with_service(
    folder: Path,
    answers: Sequence[str | tuple[str, str]],
    use: Callable[[httpx.AsyncClient], Awaitable[Any]],
    **settings: Any,
) -> Any:
    """Call `use` with a client of an application with these answers."""

    async def main() -> Any:
        async with scripted_app(folder, answers, **settings) as app:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await use(client)

    return asyncio.run(main())


@contextmanager
def scripted_server(folder: Path, answers: Sequence[str | tuple[str, str]], **settings: Any) -> Iterator[str]:
    """Serve an application with these answers over HTTP, in a thread; yield its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    servers: list[uvicorn.Server] = []

    async def main() -> None:
        async with scripted_app(folder, answers, **settings) as app:
            servers.append(uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off")))
            await servers[0].serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    while not (servers and servers[0].started):
        assert thread.is_alive(), "the application failed to start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        servers[0].should_exit = True
        thread.join()
