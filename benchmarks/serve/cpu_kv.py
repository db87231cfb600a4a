"""A compressed KV cache on CPU: SmolLM2-135M in its own 4-bit format, long prompts, against plain pages.

    PYTHONPATH=benchmarks python benchmarks/serve/cpu_kv.py [--keep 0.25] [--prompt 2000] [--requests 8]

Each engine gets the same KV cache memory and the same requests, chunks of the default text, all at once; then some
conversations have a second turn. The profile is made here from other chunks. Nothing else should run.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import table, write
from long_prompts import run_headings, run_requests, run_row

from smelt.data.default import default_documents
from smelt.kvcache.eviction.budgets import make_budget_rule
from smelt.kvcache.eviction.prefill import find_kv_shape
from smelt.kvcache.eviction.profile import EvictionProfile
from smelt.kvcache.eviction.profiling import measure_kept_ratios, sample_prompts
from smelt.kvcache.eviction.scorers import make_scorer
from smelt.models.load import load
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams

MODEL, SCORER, SEED = "smollm2-135m", "keydiff", 0


def main() -> None:
    options = _options()
    plain = load(MODEL)
    tokens = default_tokens(plain)
    begin = time.perf_counter()
    profile = make_profile(plain, tokens["calibration"], options.keep)
    profiling = time.perf_counter() - begin
    texts = sample_prompts(tokens["evaluation"] * 4, options.requests, options.prompt, SEED)
    rows: list[dict[str, Any]] = []
    for name, kv in (("plain pages", None), (f"head clusters, keep {options.keep:.0%}", profile)):
        engine = Engine(
            MODEL, max_model_len=4096, max_num_seqs=options.requests, max_num_batched_tokens=1024, kv_profile=kv,
            kv_cache_bytes=int(options.cache_gb * 1e9),
        )  # fmt: skip
        rows.append({"engine": name, "path": engine.runner.backend, **run_requests(engine, texts, options.answer)})
        rows[-1] |= second_turn(engine, texts[:4])
        print(rows[-1], flush=True)
        write("serve_cpu_kv", rows, _text(rows, options, profiling))


def default_tokens(model: Model) -> dict[str, list[int]]:
    """Return the default text as tokens."""
    assert model.tokenizer is not None
    return {
        name: model.tokenizer("\n".join(default_documents(name).values()), verbose=False)["input_ids"]
        for name in ("calibration", "evaluation")
    }


def make_profile(model: Model, tokens: list[int], keep: float) -> EvictionProfile:
    texts = sample_prompts(tokens, 12, 1024, SEED)
    kept_ratios = measure_kept_ratios(model, texts, make_scorer(SCORER), make_budget_rule("ada"), keep)
    return EvictionProfile.from_ratios(find_kv_shape(model), SCORER, keep, kept_ratios)


def second_turn(engine: Engine, texts: list[list[int]]) -> dict[str, Any]:
    """Run a second turn of each conversation in sequence: tokens recomputed, and time to first token."""
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    cached, seconds = 0, 0.0
    for text in texts:
        first = engine.submit(text, sampling)[0]
        while engine.busy:
            engine.step()
        begin = time.perf_counter()
        second = engine.submit([*first.tokens, 30, 31, 32, 33], sampling)[0]
        while not second.output:
            engine.step()
        seconds += time.perf_counter() - begin
        cached += second.num_cached_tokens
        while engine.busy:
            engine.step()
    return {"second_turn_cached": cached / sum(map(len, texts)), "second_turn_ms": seconds / len(texts) * 1e3}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--cache-gb", type=float, default=0.25)
    return parser.parse_args()


def _text(rows: list[dict[str, Any]], options: argparse.Namespace, profiling: float) -> str:
    turns = [[row["engine"], f"{row['second_turn_cached']:.0%}", f"{row['second_turn_ms']:.0f}"] for row in rows]
    return (
        "# A compressed KV cache on CPU\n\n"
        f"{MODEL}, prompts of {options.prompt:,} tokens, {options.cache_gb:g} GB of KV cache; a profile "
        f"by {SCORER} took {profiling:.0f} s. One run, seed {SEED}.\n\n"
        + table(run_headings(), [run_row(row) for row in rows])
        + "\n\nThe next turn of a conversation: the share of the first prompt that is not recomputed, and the time to "
        "the first token.\n\n" + table(["engine", "cached", "ms"], turns) + "\n"
    )


if __name__ == "__main__":
    main()
