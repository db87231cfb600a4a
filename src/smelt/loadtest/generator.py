"""The load test: requests go out at their times whether or not earlier ones were answered (an open loop)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smelt.errors import RequestError
from smelt.loadtest.arrivals import arrivals
from smelt.loadtest.completion import Endpoint, complete
from smelt.loadtest.http import Address
from smelt.loadtest.prompts import Length, Prompt, prompts_from, random_prompts
from smelt.loadtest.server import cut_to_tokens, find_model, refusal
from smelt.loadtest.summary import Summary, summarise
from smelt.loadtest.timeline import Timeline
from smelt.progress import NullProgress, Progress

_USUAL = Length(128, 128)


@dataclass(frozen=True)
class LoadTest:
    """Everything that decides about a run."""

    url: str
    requests: int = 100
    rate: float = math.inf  # a second, on average; infinity: all at once
    burstiness: float = 1.0  # 1: Poisson
    at_once: int | None = None  # requests under way, at most; others wait in the client
    model: str | None = None  # by default the first one that the server lists
    chat: bool = False
    input: Length = _USUAL  # tokens of a prompt; words where the server has no /tokenize, and in a chat
    output: Length = _USUAL  # tokens of an answer
    prompts: Path | None = None  # a file of them, in place of random words
    ignore_end: bool = True
    temperature: float = 0.0
    warmups: int = 1  # requests before the run, which do not count
    seconds: float = 600.0  # a request may take
    key: str = ""
    seed: int = 0
    limits: Mapping[str, float] = field(default_factory=dict)  # of good requests, in milliseconds

    def settings(self) -> dict[str, Any]:
        """In plain values, without the key."""
        return {
            "url": self.url, "requests": self.requests, "rate": self.rate if math.isfinite(self.rate) else "inf",
            "burstiness": self.burstiness, "max_concurrency": self.at_once, "chat": self.chat,
            "input": str(self.input), "output": str(self.output),
            "prompts": None if self.prompts is None else str(self.prompts), "ignore_eos": self.ignore_end,
            "temperature": self.temperature, "warmups": self.warmups, "timeout": self.seconds, "seed": self.seed,
        }  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What a run measured."""

    settings: dict[str, Any]  # with the model, and what lengths of prompts are counted in
    timelines: list[Timeline]
    summary: Summary
    stopped: bool = False  # by Ctrl-C: only what had ended is in it


def load_test(test: LoadTest, progress: Progress | None = None) -> Result:
    """Run it. A server that is not there or refuses the first request is an error; later failures are counted."""
    return asyncio.run(run(test, progress or NullProgress()))


async def run(test: LoadTest, progress: Progress) -> Result:
    address = Address.parse(test.url)
    times = arrivals(test.requests, test.rate, test.burstiness, test.seed)
    model = await find_model(address, test.model, test.key)
    endpoint = Endpoint(address, model, test.chat, test.key, test.ignore_end, test.temperature, test.seconds)
    prompts, unit = await _prompts(test, endpoint)
    await _warm_up(endpoint, prompts[: test.warmups])
    timelines, stopped = await _send(endpoint, prompts[test.warmups :], times, test.at_once, progress)
    failed = [line for line in timelines if line.failure]
    if timelines and len(failed) == len(timelines):
        said = f" ({failed[0].detail.rstrip('.')})" if failed[0].detail else ""
        raise RequestError(f"all {len(failed)} requests failed, the first with: {failed[0].failure}{said}.")
    settings = {**test.settings(), "model": model, "input_unit": unit}
    return Result(settings, timelines, summarise(timelines, test.limits), stopped)


async def _prompts(test: LoadTest, endpoint: Endpoint) -> tuple[list[Prompt], str]:
    """For the warm-ups and the run, and what their lengths were counted in."""
    count = test.warmups + test.requests
    if test.prompts is not None:
        return prompts_from(test.prompts, count, test.output, chat=test.chat, seed=test.seed), "prompts of a file"
    drawn = random_prompts(count, test.input, test.output, test.seed)
    if not test.chat:
        cut = await cut_to_tokens(endpoint.address, endpoint.model, drawn, test.key)
        if cut is not None:
            return cut, "tokens"
    return drawn, "words"


async def _warm_up(endpoint: Endpoint, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        line = await complete(endpoint, prompt, time.perf_counter)
        kind, _, status = line.failure.partition(" ")
        if kind == "status":
            raise RequestError(refusal(endpoint.address, int(status), line.detail))
        if line.failure:
            said = f" ({line.detail.rstrip('.')})" if line.detail else ""
            raise RequestError(f"the first request to {endpoint.address} failed: {line.failure}{said}.")


async def _send(
    endpoint: Endpoint, prompts: Sequence[Prompt], times: Sequence[float], at_once: int | None, progress: Progress
) -> tuple[list[Timeline], bool]:
    """Every prompt at its time; the timelines in the order in which they were due, as far as they ended."""
    begin = time.perf_counter()
    turns = asyncio.Semaphore(at_once) if at_once else None

    def clock() -> float:
        return time.perf_counter() - begin

    tasks = [
        asyncio.create_task(_one(endpoint, prompt, due, clock, turns))
        for prompt, due in zip(prompts, times, strict=True)
    ]
    stopped = False
    try:
        for ended in progress.track(asyncio.as_completed(tasks), "requests", total=len(tasks)):
            await ended
    except asyncio.CancelledError:  # Ctrl-C
        stopped = any(task.done() for task in tasks)
        if not stopped:
            raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks if not task.cancelled()], stopped


async def _one(
    endpoint: Endpoint, prompt: Prompt, due: float, clock: Callable[[], float], turns: asyncio.Semaphore | None
) -> Timeline:
    await asyncio.sleep(max(0.0, due - clock()))
    if turns is None:
        return await complete(endpoint, prompt, clock, due)
    async with turns:
        return await complete(endpoint, prompt, clock, due)
