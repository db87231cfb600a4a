"""Integer-only MiniLM-L6 on GLUE: post-training, after a short training, and with nonlinear functions in float.

    PYTHONPATH=src:benchmarks python benchmarks/integer_glue.py [--device cuda] [--tasks sst2 mrpc] [--seeds 0 1 2]
    PYTHONPATH=src:benchmarks python benchmarks/integer_glue.py --smoke --device cpu --name smoke

The float network of SST-2 is the one of the shared folder; the others are fine-tuned here first, once per seed, as
`finetune_glue.py` does. A seed also draws the calibration texts and shuffles the training. Every row is compared with
the float network of its seed, item by item. In the rows of the ablation, one nonlinear function (or all) of the
post-training graph computes in float64 and rounds its result to the graph's integers. `--resume` keeps finished rows.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from common import minilm_sst2, previous_rows, table, write
from finetune_glue import LENGTH, TASKS, fine_tune, glue_rows, with_head

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import labeled_batches
from smelt.measure.eval_result import EvalResult
from smelt.measure.paired import compare
from smelt.measure.task import evaluate_task
from smelt.models.model import Model
from smelt.runtime.integer.debug import NONLINEAR, float_interpreter

Row = dict[str, Any]
FLOAT, POST_TRAINING, TRAINED = "float", "post-training", "after training"
ABLATION = {f"post-training, {op} in float": [op] for op in NONLINEAR} | {
    "post-training, all nonlinear functions in float": list(NONLINEAR)
}
DEFAULT_TASKS, DEFAULT_SEEDS = ["sst2", "mrpc", "rte", "stsb"], [0, 1, 2]
CALIBRATION, FINE_TUNING_EPOCHS = 512, 4
TRAINING_ROWS, TRAINING_EPOCHS, LR = 16_000, 1.0, 1e-5


def main() -> None:
    options = read_options()
    rows = previous_rows(options.name, options.resume)
    for seed in options.seeds:
        for task in options.tasks:
            missing = [name for name in names(options) if not any(matches(row, task, seed, name) for row in rows)]
            if missing:
                rows += measure(task, seed, missing, options)
                write(options.name, rows, text(rows, options))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=DEFAULT_TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=DEFAULT_SEEDS)
    parser.add_argument("--rows", nargs="+", help="names of the rows to measure, without float; all by default")
    parser.add_argument("--limit", type=int, help="items of the development set, the first ones")
    parser.add_argument("--name", default="integer_glue", help="of the results file")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--smoke", action="store_true", help="a few rows of one task; no results to keep")
    options = parser.parse_args()
    if options.smoke:
        options.tasks, options.seeds, options.limit = ["mrpc"], [0], 16
    return options


def names(options: argparse.Namespace) -> list[str]:
    return [FLOAT, *(options.rows or [POST_TRAINING, TRAINED, *ABLATION])]


def matches(row: Row, task: str, seed: int, name: str) -> bool:
    return (row["task"], row["seed"], row["row"]) == (task, seed, name)


def measure(task: str, seed: int, missing: list[str], options: argparse.Namespace) -> list[Row]:
    """Measure one task with one seed; the float network is measured for every pairing."""
    dev, train = glue_rows(task, "dev"), glue_rows(task, "train")
    if options.smoke:
        train = train.take(range(64))

    def evaluate(model: Model) -> EvalResult:
        metric = TASKS[task].metric
        return evaluate_task(model, dev, metric=metric, max_length=LENGTH, batch_size=64, limit=options.limit)

    def row(name: str, quality: EvalResult, seconds: float) -> Row:
        paired = {}
        if name != FLOAT:
            comparison = compare(quality, reference, seed=seed)
            paired = {"difference": comparison.difference, "interval": list(comparison.interval)}
        result = {"task": task, "seed": seed, "row": name, "metric": quality.metric, "value": quality.value}
        print(result, flush=True)
        return {**result, "items": len(quality.items), "seconds": seconds, **paired}

    def step(settings: Row, samples: int) -> tuple[Model, float]:
        model = Model(copy.deepcopy(network), base.tokenizer, source=base.source)
        batches = labeled_batches(
            train, base.tokenizer, samples=min(samples, len(train)), max_length=LENGTH, batch_size=32, seed=seed
        )
        begun = time.monotonic()
        METHODS.build(settings).apply(model, MethodContext(batches=batches, seed=seed))
        return model, time.monotonic() - begun

    base = float_model(task, seed, options)
    network = base.network
    reference = evaluate(base)
    rows = [row(FLOAT, reference, 0.0)] if FLOAT in missing else []
    if set(missing) & {POST_TRAINING, *ABLATION}:
        model, seconds = step({"method": "integer-only"}, CALIBRATION)
        integer: Any = model.network
        if POST_TRAINING in missing:
            rows.append(row(POST_TRAINING, evaluate(model), seconds))
        for name in (name for name in ABLATION if name in missing):
            integer.interpreter = float_interpreter(integer.graph, ABLATION[name])
            rows.append(row(name, evaluate(model), 0.0))
    if TRAINED in missing:
        settings: Row = {
            "method": "integer-qat", "teacher": "source", "losses": [{"loss": "logits"}], "batch_size": 32,
            "epochs": max(TRAINING_EPOCHS, TRAINING_EPOCHS * 4000 / len(train)), "optimizer": {"lr": LR},
            "select": "last",
        }  # fmt: skip
        model, seconds = step({**settings, "epochs": 1.0} if options.smoke else settings, TRAINING_ROWS)
        rows.append(row(TRAINED, evaluate(model), seconds))
    return rows


def float_model(task: str, seed: int, options: argparse.Namespace) -> Model:
    if task == "sst2":
        return minilm_sst2(options.device)
    torch.manual_seed(seed)
    model = with_head(TASKS[task].outputs, options.device)
    train = glue_rows(task, "train")
    fine_tune(model, train.take(range(64)) if options.smoke else train, FINE_TUNING_EPOCHS, seed)
    return model


def text(rows: list[Row], options: argparse.Namespace) -> str:
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    cells = []
    for name in dict.fromkeys(row["row"] for row in rows):
        same = [row for row in rows if row["row"] == name]
        by_task = {task: [100 * row["value"] for row in same if row["task"] == task] for task in tasks}
        differences = {
            task: [100 * row["difference"] for row in same if row["task"] == task and "difference" in row]
            for task in tasks
        }
        measured = [statistics.mean(values) for values in differences.values() if values]
        cells.append([
            name, *(f"{statistics.mean(values):.2f}" if values else "" for values in by_task.values()),
            f"{statistics.mean(measured):+.2f}" if measured else "",
            "; ".join(f"{task} " + ", ".join(f"{value:+.2f}" for value in values)
                      for task, values in differences.items() if values),
        ])  # fmt: skip
    seeds = sorted({row["seed"] for row in rows})
    total = len(DEFAULT_TASKS) * len(DEFAULT_SEEDS) * (3 + len(ABLATION))
    missing = "" if len(rows) >= total else f" {len(rows)} of {total} rows are measured so far."
    limit = "" if options.limit is None else f", the first {options.limit} items"
    return (
        f"# Integer-only MiniLM-L6 on GLUE\n\nDevelopment sets{limit}; {len(seeds)} seeds; {CALIBRATION} texts of "
        f"calibration; training: {TRAINING_ROWS} texts at most, the float network as the teacher, lr {LR:g}. "
        "The metric is accuracy (SST-2, RTE), F1 (MRPC) or Spearman correlation (STS-B), in points; the mean "
        f"difference from float is over the tasks of the row.{missing}\n\n"
        + table(["row", *tasks, "mean difference", "difference by seed"], cells)
    )


if __name__ == "__main__":
    main()
