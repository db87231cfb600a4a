"""Streamed text for many requests at once on one event loop."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest

import smelt
from smelt.errors import RequestError
from smelt.models.model import Model
from smelt.serve.engine.async_engine import AsyncEngine
from smelt.serve.engine.request import Request
from tests.character_tokenizer import character_tokenizer
from tests.serve.test_engine import SMALL
from tests.trained import sentences, trained_llama


@pytest.fixture
def live() -> Iterator[AsyncEngine]:
    model = Model(copy.deepcopy(trained_llama(sentences(400))), character_tokenizer())
    with smelt.AsyncEngine(smelt.Engine(model, **SMALL)) as running:
        yield running


async def collect(live: AsyncEngine, prompt: str, **settings: Any) -> tuple[str, str, int]:
    text, reason, num_chunks = "", "", 0
    async for chunk in live.stream(prompt, smelt.SamplingParams(max_tokens=20, temperature=0, **settings)):
        text, reason, num_chunks = text + chunk.text, chunk.reason or reason, num_chunks + 1
    return text, reason, num_chunks


def test_streams_match_generate(live: AsyncEngine) -> None:
    prompts = ["the cat ", "a bird", "the child sees the d"]

    async def all_at_once() -> list[tuple[str, str, int]]:
        return await asyncio.gather(*(collect(live, prompt) for prompt in prompts))

    actual = asyncio.run(all_at_once())
    live.close()
    expected = live.engine.generate(prompts, smelt.SamplingParams(max_tokens=20, temperature=0))
    assert [(text, reason) for text, reason, _ in actual] == [(output.text, output.reason) for output in expected]
    assert all(num_chunks > 5 for _, _, num_chunks in actual)


def test_a_stop_string_ends_a_stream_and_frees_its_blocks(live: AsyncEngine) -> None:
    text, reason, _ = asyncio.run(collect(live, "the cat ", stop=("t h e",)))
    assert reason == "stop" and "t h e" not in text
    assert _free(live)


def test_leaving_early_frees_the_blocks(live: AsyncEngine) -> None:
    async def leave() -> list[Request]:
        stream = live.stream("the cat ", smelt.SamplingParams(max_tokens=80, n=2, ignore_eos=True))
        async for _ in stream:
            break
        requests = list(live._listeners)
        await stream.aclose()
        return requests

    requests = asyncio.run(leave())
    assert _free(live)
    assert [request.reason for request in requests] == ["abort", "abort"]  # not by finishing


def test_a_refused_request_fails_only_for_its_caller(live: AsyncEngine) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(collect(live, "x" * 200), collect(live, "the cat "), return_exceptions=True)

    refused, answered = asyncio.run(both())
    assert isinstance(refused, RequestError) and answered[1] == "length"


def _free(live: AsyncEngine) -> bool:
    """Wait briefly until all blocks are free: the engine's thread runs on its own."""
    for _ in range(500):
        if not live.engine.busy and live.engine.pool.num_free_blocks == live.engine.pool.num_blocks:
            return True
        time.sleep(0.02)
    return False
