"""Run a load test in an open loop: requests are sent on schedule, whether or not earlier ones were answered."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smelt.errors import RequestError
from smelt.loadtest.client import Endpoint, complete, find_model, refusal, truncate_to_tokens
from smelt.loadtest.http import Address
from smelt.loadtest.prompts import LengthRange, Prompt, random_prompts, read_prompts
from smelt.loadtest.summary import Summary, summarize
from smelt.loadtest.timeline import RequestTimeline
from smelt.progress import NullProgress, Progress

_DEFAULT_LENGTH = LengthRange(128, 128)


@dataclass(frozen=True)
class LoadTest:
    """Settings of one run."""

    url: str
    requests: int = 100
    rate: float = math.inf  # mean requests per second; infinity: all at once
    burstiness: float = 1.0  # 1: Poisson
    max_concurrency: int | None = None  # others wait in the client
    model: str | None = None  # by default the first that the server lists
    chat: bool = False
    input: LengthRange = _DEFAULT_LENGTH  # tokens of a prompt; words where the server has no /tokenize, and in a chat
    output: LengthRange = _DEFAULT_LENGTH  # tokens of an answer
    prompts: Path | None = None  # a file, instead of random words
    ignore_eos: bool = True
    temperature: float = 0.0
    warmups: int = 1  # requests before the run, not measured
    seconds: float = 600.0  # timeout of a request
    key: str = ""
    seed: int = 0
    limits: Mapping[str, float] = field(default_factory=dict)  # latency objectives of goodput, in milliseconds

    def settings(self) -> dict[str, Any]:
        """Return plain values, without the key."""
        return {
            "url": self.url, "requests": self.requests, "rate": self.rate if math.isfinite(self.rate) else "inf",
            "burstiness": self.burstiness, "max_concurrency": self.max_concurrency, "chat": self.chat,
            "input": str(self.input), "output": str(self.output),
            "prompts": None if self.prompts is None else str(self.prompts), "ignore_eos": self.ignore_eos,
            "temperature": self.temperature, "warmups": self.warmups, "timeout": self.seconds, "seed": self.seed,
        }  # fmt: skip


@dataclass(frozen=True)
class LoadTestResult:
    """The measurements of one run."""

    settings: dict[str, Any]  # with the model and the unit of prompt lengths
    timelines: list[RequestTimeline]
    summary: Summary
    stopped: bool = False  # by Ctrl-C: only finished requests are included


def load_test(test: LoadTest, progress: Progress | None = None) -> LoadTestResult:
    """Run a load test. It is an error if the server refuses the first request; later failures are counted."""
    return asyncio.run(run(test, progress or NullProgress()))


async def run(test: LoadTest, progress: Progress) -> LoadTestResult:
    address = Address.parse(test.url)
    times = arrivals(test.requests, test.rate, test.burstiness, test.seed)
    model = await find_model(address, test.model, test.key)
    endpoint = Endpoint(address, model, test.chat, test.key, test.ignore_eos, test.temperature, test.seconds)
    prompts, unit = await _prompts(test, endpoint)
    await _warmup(endpoint, prompts[: test.warmups])
    timelines, stopped = await _send(endpoint, prompts[test.warmups :], times, test.max_concurrency, progress)
    failed = [line for line in timelines if line.failure]
    if timelines and len(failed) == len(timelines):
        detail = f" ({failed[0].detail.rstrip('.')})" if failed[0].detail else ""
        raise RequestError(f"all {len(failed)} requests failed, the first with: {failed[0].failure}{detail}.")
    settings = {**test.settings(), "model": model, "input_unit": unit}
    return LoadTestResult(settings, timelines, summarize(timelines, test.limits), stopped)


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Draw the send time in seconds of each request; drawn before the run, so that a slow server does not delay them.

    The gaps are Gamma-distributed with shape `burstiness`: 1 is a Poisson process, less is bursty, more is more even.
    """
    if not rate > 0:
        raise RequestError(f"a rate of {rate:g} requests per second is not possible; it must be above 0, or inf.")
    if not 0 < burstiness < math.inf:
        raise RequestError(
            f"a burstiness of {burstiness:g} is not possible; it must be above 0 (1 is a Poisson process)."
        )
    if math.isinf(rate):
        return [0.0] * count
    generator, now, times = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        times.append(now)  # the first is sent immediately
        now += generator.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


async def _prompts(test: LoadTest, endpoint: Endpoint) -> tuple[list[Prompt], str]:
    """Return the prompts of warmup and run, and the unit of their lengths."""
    count = test.warmups + test.requests
    if test.prompts is not None:
        return read_prompts(test.prompts, count, test.output, chat=test.chat, seed=test.seed), "prompts of a file"
    prompts = random_prompts(count, test.input, test.output, test.seed)
    if not test.chat:
        truncated = await truncate_to_tokens(endpoint.address, endpoint.model, prompts, test.key)
        if truncated is not None:
            return truncated, "tokens"
    return prompts, "words"


async def _warmup(endpoint: Endpoint, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        line = await complete(endpoint, prompt, time.perf_counter)
        reason, _, status = line.failure.partition(" ")
        if reason == "status":
            raise RequestError(refusal(endpoint.address, int(status), line.detail))
        if line.failure:
            detail = f" ({line.detail.rstrip('.')})" if line.detail else ""
            raise RequestError(f"the first request to {endpoint.address} failed: {line.failure}{detail}.")


async def _send(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    times: Sequence[float],
    max_concurrency: int | None,
    progress: Progress,
) -> tuple[list[RequestTimeline], bool]:
    """Send every prompt at its time; return the timelines of finished requests in schedule order."""
    begin = time.perf_counter()
    semaphore = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    def clock() -> float:
        return time.perf_counter() - begin

    tasks = [
        asyncio.create_task(_send_one(endpoint, prompt, due, clock, semaphore))
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


async def _send_one(
    endpoint: Endpoint, prompt: Prompt, due: float, clock: Callable[[], float], semaphore: asyncio.Semaphore | None
) -> RequestTimeline:
    await asyncio.sleep(max(0.0, due - clock()))
    if semaphore is None:
        return await complete(endpoint, prompt, clock, due)
    async with semaphore:
        return await complete(endpoint, prompt, clock, due)
