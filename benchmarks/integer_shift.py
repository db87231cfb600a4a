"""Integer-only MiniLM-L6 on SST-2 with I-ViT's shift-based functions beside I-BERT's polynomials.

    PYTHONPATH=src:benchmarks python benchmarks/integer_shift.py [--limit 400] [--seeds 0]

A seed draws the calibration texts. Every row is compared with the float network, item by item.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

from common import minilm_sst2, table, write
from finetune_glue import LENGTH, TASKS, glue_rows

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import labeled_batches
from smelt.measure.eval_result import EvalResult
from smelt.measure.paired import compare
from smelt.measure.task import evaluate_task
from smelt.models.model import Model

FORMS = ("shift", "i-bert")
CALIBRATION = 128
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="items of the development set, the first ones")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    base, dev, train = minilm_sst2(), glue_rows("sst2", "dev"), glue_rows("sst2", "train")

    def evaluate(model: Model) -> EvalResult:
        metric = TASKS["sst2"].metric
        return evaluate_task(model, dev, metric=metric, max_length=LENGTH, batch_size=32, limit=options.limit)

    reference = evaluate(base)
    rows: list[Row] = []
    for seed in options.seeds:
        batches = labeled_batches(
            train, base.tokenizer, samples=CALIBRATION, max_length=LENGTH, batch_size=32, seed=seed
        )
        for form in FORMS:
            model = Model(copy.deepcopy(base.network), base.tokenizer, source=base.source)
            METHODS.build({"method": "integer-only", "nonlinear": form}).apply(model, MethodContext(batches=batches))
            quality = evaluate(model)
            result = compare(quality, reference, seed=seed)
            rows.append({
                "form": form, "seed": seed, "accuracy": quality.value, "float": reference.value,
                "items": len(quality.items), "difference": result.difference, "interval": list(result.interval),
                "flips": result.flips,
            })  # fmt: skip
            print(rows[-1], flush=True)
            write("integer_shift", rows, text(rows))


def text(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        low, high = (100 * bound for bound in row["interval"])
        difference = f"{100 * row['difference']:+.2f} ({low:+.2f} to {high:+.2f})"
        cells.append([row["form"], str(row["seed"]), f"{100 * row['accuracy']:.2f}", difference,
                      f"{100 * row['flips']:.2f}"])  # fmt: skip
    return (
        f"# Integer-only MiniLM-L6 on SST-2: shifts and polynomials\n\n{rows[0]['items']} items of the development "
        f"set, {100 * rows[0]['float']:.2f} % in float; {CALIBRATION} texts of calibration. Differences from float are "
        "in points, with their paired 95 % interval; flips are predictions that changed.\n\n"
        + table(["form", "seed", "accuracy, %", "difference", "flips, %"], cells)
    )


if __name__ == "__main__":
    main()
