"""The published algorithm on the sample that the authors' code draws with seed 0, against that code's figures.

    python benchmarks/sst2_published.py [--device cuda]

With the same 2,048 sentences the search must give the same widths and accuracy; rearrangement and tuning may differ
where float32 and float64 sums rank near-equal units differently.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from common import GradientCache, minilm_sst2, shared, table, write
from sst2 import AUTHORS, BATCH, BUDGETS, LENGTH, SAMPLES, STAGES

from smelt.compression.base import METHODS, MethodContext
from smelt.data import labeled_batches, load_labeled
from smelt.measure.task import evaluate_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    train = load_labeled(shared() / "data/glue/sst2/train.jsonl.gz")
    dev = load_labeled(shared() / "data/glue/sst2/dev.jsonl.gz")
    sample = train.take(np.random.RandomState(0).choice(len(train), SAMPLES))
    batches = labeled_batches(
        sample, minilm_sst2().tokenizer, samples=None, max_length=LENGTH, batch_size=BATCH, seed=0, shuffle=False
    )
    context = MethodContext(batches=batches, checkpoint=GradientCache())
    rows: list[dict[str, Any]] = []
    for stage in AUTHORS:
        for position, keep in enumerate(BUDGETS):
            model = minilm_sst2(device)
            facts = METHODS.build({**STAGES[stage], "budget": {"macs": keep}}).apply(model, context)
            accuracy = evaluate_task(model, dev, max_length=LENGTH).value
            rows.append(
                {"stage": stage, "keep": keep, "accuracy": accuracy, "authors": AUTHORS[stage][position], **facts}
            )
            print(rows[-1], flush=True)
    write("sst2_published", rows, _text(rows))


def _text(rows: list[dict[str, Any]]) -> str:
    def cell(stage: str, keep: float) -> str:
        row = next(row for row in rows if row["stage"] == stage and row["keep"] == keep)
        return f"{row['accuracy']:.4f} / {row['authors']:.4f}"

    cells = [[stage, *(cell(stage, keep) for keep in BUDGETS)] for stage in AUTHORS]
    title = (
        "# The published algorithm on the authors' own sample: ours / theirs\n\nSST-2 dev accuracy, 872 sentences.\n\n"
    )
    return title + table(["stage", *(f"{keep:.0%} of MACs" for keep in BUDGETS)], cells)


if __name__ == "__main__":
    main()
