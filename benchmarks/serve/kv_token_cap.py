"""A hard cap on the KV cache: do memory and time per request stay constant however long its text is?

    PYTHONPATH=benchmarks python benchmarks/serve/kv_token_cap.py [--tokens 20000] [--cap 512] [--answer 1000]

SmolLM2-135M in its own 4-bit format, one request with a long prompt from the default text, on one thread; under a cap,
and on plain pages, where the prompt ends at the model's context length. Per thousand tokens: the bytes of the request's
pages, and the seconds, by wall clock and CPU time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import table, write

from smelt.data.default import default_documents
from smelt.serve.engine.attention import block_bytes
from smelt.serve.engine.bounded.pages import bounded_block_bytes
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.request import Request
from smelt.serve.engine.sampling_params import SamplingParams

MODEL, STEP, CHUNK = "smollm2-135m", 1000, 250


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, cap in ((f"a cap of {options.cap}", options.cap), ("plain pages", None)):
        engine = Engine(MODEL, kv_token_cap=cap, max_num_seqs=1, prefill_chunk_size=CHUNK)
        rows.append({"engine": name, "path": engine.runner.backend, **measure(engine, options.tokens, options.answer)})
        write("serve_kv_token_cap", rows, _text(rows, options))


def measure(engine: Engine, tokens: int, answer: int) -> dict[str, Any]:
    """Measure each thousand tokens of the prompt, and the answer."""
    tokens = min(tokens, engine.max_model_len - answer)
    sampling = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
    request = engine.submit(_prompt_tokens(engine, tokens), sampling)[0]
    steps, interval = [], Interval(engine)
    while engine.busy:
        engine.step()
        interval.update(request)
        if len(request.output) <= 1 and request.num_computed_tokens >= min((len(steps) + 1) * STEP, tokens):
            steps.append(interval.end())
            print(steps[-1], flush=True)
    answer_stats = interval.end()
    return {
        "prompt": tokens,
        "steps": steps,
        "answer": answer_stats,
        "num_compressions": getattr(engine.runner, "num_compressions", 0),
    }


class Interval:
    """Some tokens of one request: its peak page bytes, and the time per thousand tokens."""

    def __init__(self, engine: Engine) -> None:
        anatomy, dtype, size = engine.model.anatomy, engine.model.network.dtype, engine.pool.block_size
        self._block = (block_bytes if engine.config.kv_cache.kv_token_cap is None else bounded_block_bytes)(
            anatomy, size, dtype
        )
        self._computed = 0
        self._begin()

    def update(self, request: Request) -> None:
        self._bytes = max(self._bytes, len(request.blocks) * self._block)
        self._computed = request.num_computed_tokens

    def end(self) -> dict[str, float]:
        """Finish this interval and begin another."""
        thousands = (self._computed - self._first) / 1000
        interval = {
            "tokens": self._computed, "bytes": self._bytes, "seconds": (time.perf_counter() - self._wall) / thousands,
            "cpu_seconds": (time.process_time() - self._busy) / thousands,
        }  # fmt: skip
        self._begin()
        return interval

    def _begin(self) -> None:
        self._bytes, self._first = 0, self._computed
        self._wall, self._busy = time.perf_counter(), time.process_time()


def _prompt_tokens(engine: Engine, count: int) -> list[int]:
    text = "\n".join(default_documents("evaluation").values())
    token_ids: list[int] = engine.model.tokenizer(text, verbose=False)["input_ids"]  # type: ignore[misc]
    return (token_ids * -(-count // len(token_ids)))[:count]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000, help="prompt length")
    parser.add_argument("--answer", type=int, default=1000, help="answer length")
    parser.add_argument("--cap", type=int, default=512)
    return parser.parse_args()


def _text(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    num_steps = max(len(row["steps"]) for row in rows)
    lines = [
        [f"{(step + 1) * STEP:,}", *(cell for row in rows for cell in _cells(row["steps"][step : step + 1]))]
        for step in range(num_steps)
    ]
    lines.append(["answer", *(cell for row in rows for cell in _cells([row["answer"]]))])
    headings = ["tokens", *(cell for row in rows for cell in (f"{row['engine']}: MB", "s", "CPU s"))]
    summary = "; ".join(
        f"{row['engine']}: {row['path']}, a prompt of {row['prompt']:,} tokens"
        + (f", compressed {row['num_compressions']} times" if row["num_compressions"] else "")
        for row in rows
    )
    return (
        "# One request with a bounded KV cache\n\n"
        f"{MODEL}, one thread, chunks of at most {CHUNK} tokens, answers of {options.answer:,}. {summary}. Over each "
        "thousand tokens of the prompt, and over the answer: the request's peak KV cache size, and the seconds per "
        "thousand tokens, by wall clock and CPU time. A interval ends with the step that passes its "
        "thousand, or with the prompt. One run.\n\n" + table(headings, lines) + "\n"
    )


def _cells(steps: list[dict[str, float]]) -> list[str]:
    if not steps:
        return ["", "", ""]
    step = steps[0]
    return [f"{step['bytes'] / 1e6:.1f}", f"{step['seconds']:.1f}", f"{step['cpu_seconds']:.1f}"]


if __name__ == "__main__":
    main()
