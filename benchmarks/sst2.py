"""Pruning stages on MiniLM fine-tuned on SST-2: random, magnitude, and every stage of the Fisher method, 3 seeds.

python benchmarks/sst2.py [--device cuda]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import GradientCache, mean, minilm_sst2, shared, table, write

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import LabeledData, labeled_batches, load_labeled
from smelt.measure.task import evaluate_task

SEEDS = (0, 1, 2)
BUDGETS = (0.75, 0.6, 0.5)
SAMPLES, LENGTH, BATCH, TOKENS = 2048, 64, 32, 25  # as in the paper; 25.16 is SST-2's mean length

FISHER = {"method": "fisher", "tokens": TOKENS}
STAGES: dict[str, dict[str, Any]] = {
    "random": {"method": "random", "tokens": TOKENS},
    "magnitude": {"method": "magnitude", "tokens": TOKENS},
    "Fisher search": {**FISHER, "repair": "none", "rearranged": False},
    "+ rearrangement": {**FISHER, "repair": "none"},
    "+ tuning, as published": {**FISHER, "repair": "tune", "teacher": "assistant", "published": True},
    "+ tuning, ridge solver": {**FISHER, "repair": "tune", "solver": "ridge", "teacher": "assistant"},
    "search + full reconstruction": {**FISHER, "repair": "full", "rearranged": False},
    "+ rearrangement + full reconstruction": {**FISHER, "repair": "full"},
    "the same, fitted to the assistant": {**FISHER, "repair": "full", "teacher": "assistant"},
}
# Results of the authors' code on this checkpoint with its seed 0 and 2,048 samples.
AUTHORS = {
    "Fisher search": (0.9002, 0.8922, 0.8784),
    "+ rearrangement": (0.8991, 0.8945, 0.8784),
    "+ tuning, as published": (0.8979, 0.8933, 0.8796),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    train = load_labeled(shared() / "data/glue/sst2/train.jsonl.gz")
    dev = load_labeled(shared() / "data/glue/sst2/dev.jsonl.gz")
    dense = evaluate_task(minilm_sst2(device), dev, max_length=LENGTH).value
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:
        context = MethodContext(batches=_batches(train, seed), seed=seed, checkpoint=GradientCache())
        for keep in BUDGETS:
            for stage, settings in STAGES.items():
                rows.append(_run(stage, settings, keep, seed, context, dev, device))
                print(rows[-1], flush=True)
        write("sst2", [{"stage": "dense", "accuracy": dense}, *rows], _text(dense, rows, seed + 1))


def _batches(train: LabeledData, seed: int) -> list[Any]:
    tokenizer = minilm_sst2().tokenizer
    return labeled_batches(
        train, tokenizer, samples=SAMPLES, max_length=LENGTH, batch_size=BATCH, seed=seed, replace=True
    )


def _run(
    stage: str, settings: dict[str, Any], keep: float, seed: int, context: MethodContext, dev: LabeledData, device: str
) -> dict[str, Any]:
    model = minilm_sst2(device)
    start = time.perf_counter()
    facts = METHODS.build({**settings, "budget": {"macs": keep}}).apply(model, context)
    seconds = time.perf_counter() - start
    accuracy = evaluate_task(model, dev, max_length=LENGTH).value
    return {"stage": stage, "keep": keep, "seed": seed, "accuracy": accuracy, "seconds": seconds, **facts}


def _text(dense: float, rows: list[dict[str, Any]], seeds: int) -> str:
    def cell(stage: str, keep: float) -> str:
        results = [row["accuracy"] for row in rows if row["stage"] == stage and row["keep"] == keep]
        return f"{mean(results):.4f} ({min(results):.4f}-{max(results):.4f})"

    cells = [[stage, *(cell(stage, keep) for keep in BUDGETS)] for stage in STAGES]
    cells += [[f"{stage}: the authors' code", *(f"{value:.4f}" for value in AUTHORS[stage])] for stage in AUTHORS]
    title = (
        "# MiniLM-L6 on SST-2: accuracy by stage and share of MACs kept\n\n"
        f"Dev accuracy (872 sentences, so one standard error is about 0.010), mean of {seeds} seeds and "
        f"(lowest-highest); dense {dense:.4f}. {SAMPLES} training sentences drawn with replacement, no retraining. "
        "Gradients are shared by all stages of a seed. The last rows are the authors' released code on this "
        "checkpoint, one seed.\n\n"
    )
    return title + table(["stage", *(f"{keep:.0%} of MACs" for keep in BUDGETS)], cells)


if __name__ == "__main__":
    main()
