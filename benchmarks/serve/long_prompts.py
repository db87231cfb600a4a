"""Long prompts through an engine, all at once: how many requests fit, prefill speed, and decode speed."""

from __future__ import annotations

import statistics
import time
from typing import Any

from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams


def run_requests(engine: Engine, texts: list[list[int]], answer: int) -> dict[str, Any]:
    """Measure everything from the first prompt to the last token, and the steps in which all running requests only
    decode.
    """
    sampling = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
    start = last = time.perf_counter()
    requests = [engine.submit(text, sampling)[0] for text in texts]
    residents, decoding, mixing, prefilled = 0, [], [], 0.0
    while engine.busy:
        engine.step()
        now = time.perf_counter()
        reading = any(request.num_computed_tokens < len(request.prompt) for request in engine.scheduler.running)
        ready = sum(request.num_computed_tokens >= len(request.prompt) for request in engine.scheduler.running)
        residents = max(residents, ready)
        if reading:
            prefilled = now - start
            mixing.append(now - last)
        elif ready:
            decoding.append((ready, now - last))
        last = now
    assert all(len(request.output) == answer for request in requests)
    max_batch = max(count for count, _ in decoding)
    full = statistics.median(seconds for count, seconds in decoding if count == max_batch)
    return {
        "requests": len(texts), "prompt": len(texts[0]), "answer": answer, "residents": residents,
        "seconds": last - start, "tokens_per_second": len(texts) * answer / (last - start),
        "prefill_seconds": prefilled, "decode_batch_size": max_batch, "decode_ms": full * 1e3,
        "decode_tokens_per_second": max_batch / full, "preemptions": engine.state()["preemptions"],
        "pages": engine.pool.num_blocks, "reading_steps": len(mixing),
        "reading_ms": statistics.median(mixing or [0.0]) * 1e3,
        "longest_ms": [round(seconds * 1e3, 1) for seconds in sorted(mixing)[:-6:-1]],
    }  # fmt: skip


def run_headings() -> list[str]:
    return [
        "engine", "requests", "tokens per answer", "at once", "seconds", "tokens/s", "seconds to prefill all",
        "decode: requests, ms per step", "decode tokens/s",
    ]  # fmt: skip


def run_row(row: dict[str, Any]) -> list[str]:
    return [
        row["engine"], str(row["requests"]), str(row["answer"]), str(row["residents"]), f"{row['seconds']:.1f}",
        f"{row['tokens_per_second']:.0f}", f"{row['prefill_seconds']:.1f}",
        f"{row['decode_batch_size']}: {row['decode_ms']:.1f}", f"{row['decode_tokens_per_second']:.0f}",
    ]  # fmt: skip
