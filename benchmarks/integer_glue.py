"""Integer-only MiniLM-L6 on GLUE: post-training, after a short training, and with nonlinear functions in float.

    PYTHONPATH=src:benchmarks python benchmarks/integer_glue.py [--device cuda] [--tasks sst2 mrpc] [--seeds 0 1 2]
    PYTHONPATH=src:benchmarks python benchmarks/integer_glue.py --smoke --device cpu --name smoke

The float network of SST-2 is the one of the shared folder; one network per other task is fine-tuned here first, as
`finetune_glue.py` does, and kept in the folder of `--networks`. A seed draws the calibration texts and shuffles the
training. Every row is compared with the float network, item by item. In the rows of the ablation, one nonlinear
function (or all) of the post-training graph computes in float64 and rounds its result to the graph's integers; they run
by the reference, which is slow. `--resume` keeps finished rows.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import minilm_sst2, previous_rows, table, write
from finetune_glue import LENGTH, TASKS, fine_tune, glue_rows, with_head

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import LabeledData, labeled_batches
from smelt.files import atomic_folder
from smelt.measure.eval_result import EvalResult
from smelt.measure.paired import compare
from smelt.measure.task import evaluate_task
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.runtime.integer.debug import NONLINEAR, float_interpreter
from smelt.runtime.integer.run import preferred_backend

Row = dict[str, Any]
FLOAT, POST_TRAINING, TABLES, TRAINED = "float", "post-training", "post-training, NN-LUT", "after training"
ABLATION = {f"post-training, {op} in float": [op] for op in NONLINEAR} | {
    "post-training, all nonlinear functions in float": list(NONLINEAR)
}
DEFAULT_TASKS, DEFAULT_SEEDS = ["sst2", "mrpc", "rte", "stsb"], [0, 1, 2]
DEFAULT_ROWS = [POST_TRAINING, TABLES, TRAINED, *ABLATION]
CALIBRATION, FINE_TUNING_EPOCHS, FINE_TUNING_SEED, ENTRIES = 512, 4, 0, 16
TRAINING_ROWS, TRAINING_EPOCHS, LR = 16_000, 1.0, 1e-5


def main() -> None:
    options = read_options()
    if preferred_backend(torch.device(options.device)) == "reference":
        raise SystemExit("integer graphs have no fused kernels on this device; install a C++ compiler or Triton")
    rows = previous_rows(options.name, options.resume)
    for seed in options.seeds:
        for task in options.tasks:
            missing = [name for name in options.rows if not any(matches(row, task, seed, name) for row in rows)]
            with_float = not any(row["task"] == task and row["row"] == FLOAT for row in rows)
            if missing or with_float:
                for row in measure(task, seed, [FLOAT, *missing] if with_float else missing, options):
                    rows.append(row)
                    write(options.name, rows, text(rows, options))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=DEFAULT_TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=DEFAULT_SEEDS)
    parser.add_argument("--rows", nargs="*", choices=DEFAULT_ROWS, default=DEFAULT_ROWS, help="beside float")
    parser.add_argument("--limit", type=int, help="items of the development set, the first ones")
    parser.add_argument(
        "--networks", type=Path, default=Path(tempfile.gettempdir()) / "smelt-integer-glue",
        help="folder of the fine-tuned float networks; what is there is used again",
    )  # fmt: skip
    parser.add_argument("--name", default="integer_glue", help="of the results file")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--smoke", action="store_true", help="a few rows of one task; no results to keep")
    options = parser.parse_args()
    if options.smoke:
        options.tasks, options.seeds, options.limit = ["mrpc"], [0], 16
        options.networks = options.networks / "smoke"
    return options


def matches(row: Row, task: str, seed: int, name: str) -> bool:
    return (row["task"], row["seed"], row["row"]) == (task, seed, name)


def measure(task: str, seed: int, missing: list[str], options: argparse.Namespace) -> Iterator[Row]:
    """Measure the missing rows of one task and seed."""
    train = training_rows(task, options)
    base, reference = float_model(task, options), float_quality(task, options)

    def row(name: str, quality: EvalResult, seconds: float) -> Row:
        paired = {}
        if name != FLOAT:
            comparison = compare(quality, reference, seed=seed)
            paired = {"difference": comparison.difference, "interval": list(comparison.interval)}
        result = {"task": task, "seed": seed, "row": name, "metric": quality.metric, "value": quality.value}
        return {**result, "items": len(quality.items), "seconds": seconds, **paired}

    def step(settings: Row, samples: int) -> tuple[Model, float]:
        model = Model(copy.deepcopy(base.network), base.tokenizer, source=base.source)
        batches = labeled_batches(
            train, base.tokenizer, samples=min(samples, len(train)), max_length=LENGTH, batch_size=32, seed=seed
        )
        begun = time.monotonic()
        METHODS.build(settings).apply(model, MethodContext(batches=batches, seed=seed))
        return model, time.monotonic() - begun

    if FLOAT in missing:
        yield row(FLOAT, reference, 0.0)
    if set(missing) & {POST_TRAINING, *ABLATION}:
        model, seconds = step({"method": "integer-only"}, CALIBRATION)
        integer: Any = model.network
        if POST_TRAINING in missing:
            yield row(POST_TRAINING, evaluate(model, task, options), seconds)
        for name in (name for name in ABLATION if name in missing):
            integer.interpreter = float_interpreter(integer.graph, ABLATION[name])
            yield row(name, evaluate(model, task, options), 0.0)
    if TABLES in missing:
        model, seconds = step({"method": "integer-only", "nonlinear": "nn-lut", "entries": ENTRIES}, CALIBRATION)
        yield row(TABLES, evaluate(model, task, options), seconds)
    if TRAINED in missing:
        settings: Row = {
            "method": "integer-qat", "teacher": "source", "losses": [{"loss": "logits"}], "batch_size": 32,
            "epochs": TRAINING_EPOCHS if options.smoke else max(TRAINING_EPOCHS, TRAINING_EPOCHS * 4000 / len(train)),
            "optimizer": {"lr": LR}, "select": "last",
        }  # fmt: skip
        model, seconds = step(settings, TRAINING_ROWS)
        yield row(TRAINED, evaluate(model, task, options), seconds)


def evaluate(model: Model, task: str, options: argparse.Namespace) -> EvalResult:
    dev, metric = glue_rows(task, "dev"), TASKS[task].metric
    return evaluate_task(model, dev, metric=metric, max_length=LENGTH, batch_size=64, limit=options.limit)


def training_rows(task: str, options: argparse.Namespace) -> LabeledData:
    train = glue_rows(task, "train")
    return train.take(range(64)) if options.smoke else train


_QUALITY: dict[str, EvalResult] = {}


def float_quality(task: str, options: argparse.Namespace) -> EvalResult:
    """Return the quality of the float network, measured once per run."""
    if task not in _QUALITY:
        _QUALITY[task] = evaluate(float_model(task, options), task, options)
    return _QUALITY[task]


def float_model(task: str, options: argparse.Namespace) -> Model:
    if task == "sst2":
        return minilm_sst2(options.device)
    folder = options.networks / f"{task}-{FINE_TUNING_EPOCHS}-epochs"
    if not folder.exists():
        torch.manual_seed(FINE_TUNING_SEED)
        model = with_head(TASKS[task].outputs, options.device)
        train = training_rows(task, options)
        fine_tune(model, train, FINE_TUNING_EPOCHS, FINE_TUNING_SEED, similar_lengths=True)
        options.networks.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as temporary:
            save_artifact(model, temporary, {"fine_tuned": {"task": task, "epochs": FINE_TUNING_EPOCHS}})
    model = load(str(folder))
    model.network.to(options.device)
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
    total = len(DEFAULT_TASKS) * (1 + len(DEFAULT_SEEDS) * len(DEFAULT_ROWS))
    training = (
        f"Training: at most {TRAINING_ROWS} texts, the float network as the teacher, lr {LR:g}. "
        if any(row["row"] == TRAINED for row in rows)
        else "The row after training is not measured yet. "
    )
    missing = "" if len(rows) >= total else f" {len(rows)} of {total} rows are measured so far."
    limit = "" if options.limit is None else f", the first {options.limit} items"
    return (
        f"# Integer-only MiniLM-L6 on GLUE\n\nDevelopment sets{limit}. One float network per task, fine-tuned "
        f"for {FINE_TUNING_EPOCHS} epochs, in batches of similar lengths (SST-2: the one of the shared folder). A "
        f"seed draws the {CALIBRATION} texts of calibration and the order of training. {training}NN-LUT: {ENTRIES} "
        "entries, not retrained. The metric is accuracy (SST-2, RTE), F1 (MRPC) or Spearman correlation (STS-B), in "
        f"points; the mean difference from float is over the tasks that the row has.{missing}\n\n"
        + table(["row", *tasks, "mean difference", "difference by seed"], cells)
        + tables_against_polynomials(rows)
    )


def tables_against_polynomials(rows: list[Row]) -> str:
    """Compare NN-LUT with I-BERT's polynomials, which were calibrated on the same texts."""
    values = {(row["task"], row["seed"], row["row"]): row["value"] for row in rows}
    pairs: dict[str, list[float]] = {}
    for task, seed, name in values:
        if name == TABLES and (task, seed, POST_TRAINING) in values:
            difference = values[task, seed, TABLES] - values[task, seed, POST_TRAINING]
            pairs.setdefault(task, []).append(100 * difference)
    if not pairs:
        return ""
    mean = statistics.mean(statistics.mean(differences) for differences in pairs.values())
    by_task = "; ".join(f"{task} " + ", ".join(f"{value:+.2f}" for value in pairs[task]) for task in pairs)
    return f"\n\nNN-LUT minus I-BERT's polynomials with the same calibration: mean {mean:+.2f} ({by_task})."


if __name__ == "__main__":
    main()
