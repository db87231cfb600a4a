"""Realistic clients: some read to the end, some leave in the middle or before the first token, some read slowly.

Used by tests/serve/test_robustness.py with a few hundred of them, and by robustness.py with thousands.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx

BEHAVIORS = ("whole", "stream", "leaves", "leaves early", "slow", "stop")


async def run_client(client: httpx.AsyncClient, number: int) -> str:
    """Run run_limited request whose behavior depends on its number; return its outcome."""
    rng = random.Random(number)
    behavior = BEHAVIORS[number % len(BEHAVIORS)]
    body: dict[str, Any] = {
        "prompt": [rng.randrange(32, 127) for _ in range(rng.randrange(1, 200))],
        "max_tokens": rng.randrange(1, 120), "seed": number, "n": rng.choice((1, 1, 2, 4)), "ignore_eos": True,
    }  # fmt: skip
    if behavior == "stop":
        body |= {"stop": [chr(rng.randrange(97, 123)) for _ in range(8)], "max_tokens": 400}
    if behavior.startswith("leaves"):
        body |= {"max_tokens": 1500}
    try:
        if behavior == "leaves early":  # without waiting for the answer
            await asyncio.wait_for(client.post("/v1/completions", json=body), rng.random() / 5)
            return "answered before it left"
        if behavior == "whole":
            answer = await client.post("/v1/completions", json=body)
            return behavior if answer.status_code == 200 and len(answer.json()["choices"]) == body["n"] else "wrong"
        return await _streamed(client, body, behavior, rng)
    except (TimeoutError, httpx.TimeoutException):
        return behavior


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any], behavior: str, rng: random.Random) -> str:
    leaves_after = rng.randrange(1, 20) if behavior == "leaves" else 10**9
    count, last = 0, ""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            return "wrong"
        async for line in answer.aiter_lines():
            count, last = count + 1, line or last
            if count >= leaves_after:
                return behavior
            if behavior == "slow" and count % 10 == 0:
                await asyncio.sleep(0.005)
    return behavior if last == "data: [DONE]" else "wrong"


async def run_clients(url: str, numbers: range, concurrency: int = 40) -> Counter[str]:
    """Run many of them; return how many ended in each way."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def run_limited(number: int) -> str:
            async with gate:
                return await run_client(client, number)

        return Counter(await asyncio.gather(*(run_limited(number) for number in numbers)))
