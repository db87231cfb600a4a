"""Pruning SmolLM2-135M: WikiText-2 perplexity after removing 10, 20 and 30% of the blocks' parameters.

    python benchmarks/wikitext2.py [--seeds 3] [--samples 128] [--device cuda]

All methods see the same calibration windows of the training split; perplexity is over the first windows of the test
split at context 1,024, side by side.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

from common import GradientCache, mean, previous_rows, shared, table, write

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import TextData, load_text, text_batches
from smelt.measure.perplexity import perplexity
from smelt.models.load import load
from smelt.models.model import Model

REMOVED = (0.1, 0.2, 0.3)
CONTEXT, LENGTH, BATCH = 1024, 256, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "magnitude": {"method": "magnitude"},
    "Wanda-sp": {"method": "wanda-sp"},
    "FLAP": {"method": "flap"},
    "Taylor (LLM-Pruner)": {"method": "taylor"},
    "Fisher search": {"method": "fisher", "repair": "none", "rearranged": False},
    "+ rearrangement": {"method": "fisher", "repair": "none"},
    "+ tuning (ridge)": {"method": "fisher", "repair": "tune", "solver": "ridge"},
    "Fisher search + full reconstruction": {"method": "fisher", "repair": "full", "rearranged": False},
    "Fisher + rearrangement + full reconstruction": {"method": "fisher", "repair": "full"},
    "FLAP's choice + full reconstruction": {"method": "flap", "repair": "full"},
}


def main() -> None:
    options = _options()
    train = load_text(shared() / "data/wikitext2/train.txt.gz")
    test = load_text(shared() / "data/wikitext2/test.txt.gz")
    limit = options.windows * CONTEXT
    base = load("smollm2-135m", device=options.device)
    dense = perplexity(base, test, context=CONTEXT, limit=limit, batch_size=BATCH).value
    print("dense", dense, flush=True)
    rows = [row for row in previous_rows("wikitext2", options.resume) if "seed" in row]
    done = {(row["method"], row["removed"], row["seed"]) for row in rows}
    for seed in range(options.seeds):
        batches = text_batches(
            train, base.tokenizer, samples=options.samples, length=LENGTH, batch_size=BATCH, seed=seed
        )
        context = MethodContext(batches=batches, seed=seed, checkpoint=GradientCache())
        for removed in REMOVED:
            for name, settings in SETTINGS.items():
                if (name, removed, seed) in done:
                    continue
                rows.append(_run(name, settings, removed, seed, context, test, limit, base))
                print(rows[-1], flush=True)
        write("wikitext2", [{"method": "dense", "perplexity": dense}, *rows], _text(dense, rows, options, seed + 1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64, help=f"calibration windows of {LENGTH} tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resume", action="store_true", help="keep the rows of a run that was cut off")
    parser.add_argument("--windows", type=int, default=64, help=f"test windows of {CONTEXT} tokens")
    return parser.parse_args()


def _run(
    name: str, settings: dict[str, Any], removed: float, seed: int, context: MethodContext, test: TextData, limit: int,
    base: Model,
) -> dict[str, Any]:  # fmt: skip
    model = Model(copy.deepcopy(base.network), base.tokenizer)
    start = time.perf_counter()
    facts = METHODS.build({**settings, "budget": {"parameters": 1 - removed}}).apply(model, context)
    seconds = time.perf_counter() - start
    value = perplexity(model, test, context=CONTEXT, limit=limit, batch_size=BATCH).value
    return {"method": name, "removed": removed, "seed": seed, "perplexity": value, "seconds": seconds, **facts}


def _text(dense: float, rows: list[dict[str, Any]], options: argparse.Namespace, seeds: int) -> str:
    def cell(name: str, removed: float) -> str:
        results = [row["perplexity"] for row in rows if row["method"] == name and row["removed"] == removed]
        return f"{mean(results):.1f}" + (f" ({min(results):.1f}-{max(results):.1f})" if len(results) > 1 else "")

    cells = [[name, *(cell(name, removed) for removed in REMOVED)] for name in SETTINGS]
    title = (
        "# SmolLM2-135M on WikiText-2: perplexity after removing block parameters\n\n"
        f"Mean of {seeds} seeds and (lowest-highest); dense {dense:.2f}. {options.samples} windows of {LENGTH} tokens "
        f"of the training split for every method; the first {options.windows} windows of {CONTEXT} tokens of the test "
        "split; no retraining.\n\n"
    )
    return title + table(["method", *(f"{removed:.0%} removed" for removed in REMOVED)], cells)


if __name__ == "__main__":
    main()
