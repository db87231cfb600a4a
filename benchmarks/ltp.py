"""Token pruning of MiniLM-L6 on GLUE: learned thresholds (LTP) against top-k and a fixed ratio, and all tokens.

    PYTHONPATH=src:benchmarks python benchmarks/ltp.py --device cuda --jobs 16 --folder FOLDER --no-latency [--resume]
    PYTHONPATH=src:benchmarks python benchmarks/ltp.py --device cpu --jobs 1 --folder FOLDER --latency-only
    PYTHONPATH=src:benchmarks python benchmarks/ltp.py --smoke --device cpu --jobs 1

Every row starts from the same float network, whose loss on the labels and whose own logits (distillation) train it
with the same number of epochs; one row is that network after these epochs with all tokens. LTP first learns soft
thresholds on relative importance, which does not depend on the length, and then trains with dropped tokens; the
checkpoint that is best on held-out training data is kept. Lambda is found by bisection with the first seed, and taken
by the others: a shift of the thresholds closes what is left to the budget. The linear ramp of top-k cannot reach half
the MACs of 6 layers, so it is compared at larger budgets. MACs are counted on the development set from the tokens that
each layer computes, relative to all tokens. Latency is that of the first texts of the development set on CPU, both
networks in turns, at the texts' own lengths and padded to 128 tokens (the padding is part of the batch; token pruning
never computes it), with one thread and batches of 1 and 8, for the first seed.

The float network of SST-2 is that of the shared folder; the others are fine-tuned here first, as `finetune_glue.py`
does. Rows are written as they are finished; `--resume` adds what is missing. `--no-latency` leaves the timing to a run
with `--latency-only`, which reads the models of --folder.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import minilm_sst2, table
from finetune_glue import TASKS, fine_tune, glue_rows, with_head
from qat_runs import Grid, Row, add_options, flags, mean_and_seeds, train_cells, work_folder
from torch.nn import functional as F

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import Batch, labeled_batches
from smelt.measure.task import evaluate_task
from smelt.measure.token_cost import count_tokens, text_lengths, token_macs
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model

MAX_LENGTH, LR = 128, 2e-5
FINE_TUNING_EPOCHS = {"mrpc": 4, "rte": 20, "stsb": 4}  # of the float networks; RTE has 2,490 texts
FLOAT, LTP, TOPK, RATIO = "all tokens", "ltp", "token-topk", "token-ratio"
TRAINED_ON = "all tokens, trained on"
METHOD_NAMES = (LTP, TOPK, RATIO)
EPOCHS = {
    "sst2": (1.0, 2.0),
    "mrpc": (10.0, 5.0),
    "rte": (10.0, 5.0),
    "stsb": (5.0, 5.0),
}  # soft, then with dropped tokens, as in the paper; there SST-2 has 5 of the latter
TOPK_BUDGET = 0.6  # below, its linear ramp needs more than 6 layers
TIMED = {1: 64, 8: 128}  # texts, by batch size
REPEATS = 5


def main() -> None:
    options = read_options()
    if options.cells is not None:
        train_cells(options.cells, lambda cell: run_cell(cell, options))
        return
    with work_folder(options):
        names = ["rows", "batch_size", "threshold_lr", "trials", "smoke", "no_latency", "latency_only"]
        optional = ("fine_tuning_epochs", "hard_epochs", "regularization")
        names += [name for name in optional if getattr(options, name) is not None]
        options.resume |= options.latency_only
        grid = Grid(__file__, options, flags(options, *names), key, text)
        floats = [{"task": task, "row": FLOAT, "budget": 1.0, "seed": 0} for task in options.tasks]
        if options.latency_only:
            timed = [*floats, *(cell for cell in cells(options) if cell["seed"] == options.seeds[0])]
            grid.time(timed)
            return
        grid.prepare([cell for cell in floats if not (options.folder / model_name(cell)).exists()])
        waiting = [cell for cell in grid.missing(cells(options)) if needs_lambda(cell, grid.rows, options)]
        ready = [cell for cell in grid.missing(cells(options)) if cell not in waiting]
        for part in (ready, waiting):  # the first seed finds the lambdas of the others
            part = [with_lambda(cell, grid.rows) for cell in part]
            # The longest first; RTE, which this encoder does not learn, last.
            part.sort(key=lambda cell: (cell["row"] != LTP, cell["task"] == "rte", cell["task"] != "sst2"))
            grid.run(part, own_process=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "ltp", seeds=[0, 1, 2], jobs=4)
    parser.add_argument("--tasks", nargs="+", choices=list(EPOCHS), default=["sst2", "rte", "stsb", "mrpc"])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.7, 0.5], help="shares of the MACs")
    parser.add_argument("--rows", type=int, default=70_000, help="texts of the training set, at most: all of them")
    parser.add_argument("--batch-size", type=int, default=64, help="of training")
    parser.add_argument("--threshold-lr", type=float, default=2e-4, help="few steps need a larger one")
    parser.add_argument("--trials", type=int, default=4, help="of the bisection for lambda")
    parser.add_argument("--fine-tuning-epochs", type=int, help="of the float networks; default: depends on the task")
    parser.add_argument("--hard-epochs", type=float, help="with dropped tokens; default: depends on the task")
    parser.add_argument("--regularization", type=float, help="lambda; default: found by bisection")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--no-latency", action="store_true", help="time nothing")
    parser.add_argument("--latency-only", action="store_true", help="time the models of --folder on this machine")
    parser.add_argument("--smoke", action="store_true", help="a few texts of one task; no results to keep")
    options = parser.parse_args()
    if options.latency_only and options.folder is None:
        parser.error("--latency-only needs the --folder of a run with --no-latency")
    if options.smoke:
        options.tasks, options.budgets, options.seeds, options.rows = ["sst2"], [0.5], [0], 48
        options.trials = 1
    return options


def cells(options: argparse.Namespace) -> list[Row]:
    pruned = [(method, budget) for budget in options.budgets for method in METHOD_NAMES]
    rows = [(method, budget) for method, budget in pruned if method != TOPK or budget >= TOPK_BUDGET]
    return [
        {"task": task, "row": method, "budget": budget, "seed": seed}
        for seed in options.seeds for task in options.tasks for method, budget in [*rows, (TRAINED_ON, 1.0)]
    ]  # fmt: skip


def needs_lambda(cell: Row, rows: list[Row], options: argparse.Namespace) -> bool:
    """Return whether a cell has to wait for the lambda of the first seed."""
    has_lambda = options.regularization is not None or "lambda" in with_lambda(cell, rows)
    return cell["row"] == LTP and cell["seed"] != options.seeds[0] and not has_lambda


def with_lambda(cell: Row, rows: list[Row]) -> Row:
    """Return an LTP cell with the lambda that another seed has found, if one has."""
    same = [row for row in rows if all(row[name] == cell[name] for name in ("task", "row", "budget"))]
    known = [row["regularization"] for row in same if "regularization" in row]
    return {**cell, "lambda": known[0]} if known else cell


def key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in ("task", "row", "budget", "seed"))


def model_name(cell: Row) -> str:
    return f"{cell['task']}-{cell['row'].replace(' ', '-')}-{cell['budget']:g}-{cell['seed']}"


def run_cell(cell: Row, options: argparse.Namespace) -> Row:
    torch.set_num_threads(1)
    folder = options.folder / model_name(cell)
    if options.latency_only:
        return {**cell, "latency": latency(cell, load(str(folder)), options)}
    begun, facts = time.monotonic(), {}
    if cell["row"] == FLOAT:
        model = float_model(cell["task"], options)
    else:
        model = load(str(options.folder / model_name({**cell, "row": FLOAT, "budget": 1.0, "seed": 0})))
        model.network.to(options.device)
        with tempfile.TemporaryDirectory() as work:
            context = MethodContext(
                batches=training_batches(model, cell, options), seed=cell["seed"], folder=Path(work)
            )
            facts = METHODS.build(settings(cell, options)).apply(model, context)
    facts = {name: facts[name] for name in ("macs_kept", "regularization", "trials", "rule") if name in facts}
    seconds = time.monotonic() - begun
    folder.mkdir(parents=True, exist_ok=True)
    save_artifact(model, folder)
    task, dev = TASKS[cell["task"]], glue_rows(cell["task"], "dev")
    limit = 64 if options.smoke else None
    quality = evaluate_task(model, dev, metric=task.metric, max_length=MAX_LENGTH, batch_size=64, limit=limit)
    batches = dev_batches(model, cell, options, 64)
    counts = count_tokens(model, batches)
    dense = token_macs(model.anatomy, text_lengths(batches)[:, None].expand(-1, counts.shape[1]))
    row = {
        **cell, "metric": task.metric, "value": quality.value, "seconds": seconds, **facts,
        "dev_macs": token_macs(model.anatomy, counts) / dense, "dev_tokens": counts.double().mean(0).tolist(),
    }  # fmt: skip
    return row if options.no_latency else {**row, "latency": latency(cell, model, options)}


def float_model(task: str, options: argparse.Namespace) -> Model:
    if task == "sst2":
        return minilm_sst2(options.device)
    torch.manual_seed(0)
    model = with_head(TASKS[task].outputs, options.device)
    epochs = FINE_TUNING_EPOCHS[task] if options.fine_tuning_epochs is None else options.fine_tuning_epochs
    fine_tune(model, glue_rows(task, "train"), epochs, seed=0)
    return model


def training_batches(model: Model, cell: Row, options: argparse.Namespace) -> list[Batch]:
    train = glue_rows(cell["task"], "train")
    samples = min(len(train), options.rows)
    return labeled_batches(train, model.tokenizer, samples=samples, max_length=MAX_LENGTH, batch_size=64, seed=0)


def dev_batches(model: Model, cell: Row, options: argparse.Namespace, batch_size: int, limit: int = 0) -> list[Batch]:
    dev = glue_rows(cell["task"], "dev")
    limit = min(limit or len(dev), len(dev), 8 if options.smoke else len(dev))
    return labeled_batches(
        dev.take(range(limit)), model.tokenizer, samples=None, max_length=MAX_LENGTH, batch_size=batch_size, seed=0,
        shuffle=False,
    )  # fmt: skip


def settings(cell: Row, options: argparse.Namespace) -> Row:
    """Return the step of a cell; baselines train as long as both stages of LTP together."""
    soft, hard = EPOCHS[cell["task"]] if not options.smoke else (1.0, 1.0)
    hard = hard if options.hard_epochs is None else options.hard_epochs
    chosen = {"method": cell["row"], "budget": {"macs": cell["budget"]}}
    step: dict[str, Any] = {
        **({"method": "finetune"} if cell["row"] == TRAINED_ON else chosen), "teacher": "source",
        "losses": [{"loss": "labels"}, {"loss": "logits"}], "batch_size": options.batch_size, "optimizer": {"lr": LR},
        "precision": "bf16" if options.device.startswith("cuda") else "off", "checkpoint_every": 250,
    }  # fmt: skip
    if cell["row"] == LTP:
        more = {
            "soft_epochs": soft, "epochs": hard, "threshold_lr": options.threshold_lr, "relative": True,
            "trials": options.trials, "regularization": cell.get("lambda", options.regularization),
        }  # fmt: skip
    else:
        more = {"epochs": soft + hard, **({"dense_layers": 1} if cell["row"] == TOPK else {})}
    return {**step, **more}


@torch.inference_mode()
def latency(cell: Row, model: Model, options: argparse.Namespace) -> Row:
    """Return milliseconds per text and speedup over all tokens, by batch size and padding; medians of rounds."""
    networks = [model.network.cpu().float().eval()]
    if cell["row"] != FLOAT:
        networks.append(
            load(str(options.folder / model_name({**cell, "row": FLOAT, "budget": 1.0, "seed": 0}))).network
        )
    results: Row = {}
    for batch_size, texts in TIMED.items():
        for padded in (False, True):
            batches = [
                {name: tensor for name, tensor in batch.items() if name != "labels"}
                for batch in dev_batches(model, cell, options, batch_size, texts)
            ]
            if padded:
                batches = [pad(batch, MAX_LENGTH) for batch in batches]
            rounds = [
                [seconds(network, batches) for network in networks] for _ in range(2 if options.smoke else REPEATS)
            ]
            columns = [statistics.median(column) for column in zip(*rounds, strict=True)]
            count = sum(len(batch["input_ids"]) for batch in batches)
            name = f"batch {batch_size}, {'padded to 128' if padded else 'own lengths'}"
            results[name] = {"ms": 1000 * columns[0] / count, "speedup": columns[-1] / columns[0]}
    return results


def pad(batch: Batch, length: int) -> Batch:
    return {name: F.pad(tensor, (0, length - tensor.shape[1])) for name, tensor in batch.items()}


def seconds(network: Any, batches: list[Batch]) -> float:
    begun = time.perf_counter()
    for batch in batches:
        network(**batch)
    return time.perf_counter() - begun


def text(rows: list[Row], options: argparse.Namespace) -> str:
    order = [FLOAT, TRAINED_ON, *METHOD_NAMES]
    rows = sorted(rows, key=lambda row: (row["task"], -row["budget"], order.index(row["row"]), row["seed"]))
    timed = [name for row in rows for name in row.get("latency", {})]
    columns = list(dict.fromkeys(timed))
    lines = []
    for task, budget, method in dict.fromkeys((row["task"], row["budget"], row["row"]) for row in rows):
        same = [row for row in rows if (row["task"], row["budget"], row["row"]) == (task, budget, method)]
        macs = statistics.mean(row["dev_macs"] for row in same)
        lines.append([
            task, same[0]["metric"], method, f"{budget:g}", f"{macs:.2f}",
            *mean_and_seeds([100 * row["value"] for row in same]),
            *(_speed([row["latency"][name] for row in same if name in row.get("latency", {})]) for name in columns),
        ])  # fmt: skip
    headings = ["task", "metric", "method", "budget", "MACs on dev", "mean", "by seed", *columns]
    missing = len(options.tasks) + len(cells(options)) - len(rows)
    return (
        f"# Token pruning of MiniLM-L6 on GLUE\n\nUp to {options.rows} training texts, batches of "
        f"{options.batch_size}, lr {LR:g} (thresholds {options.threshold_lr:g}, on relative importance), labels and "
        "the float network's logits; top-k keeps all tokens in the first layer. Times: CPU, one thread, ms per text "
        "and speedup over all tokens."
        + (f" {options.hard_epochs:g} epochs with dropped tokens." if options.hard_epochs is not None else "")
        + (f" Lambda {options.regularization:g}." if options.regularization is not None else "")
        + (f" {missing} rows are missing." if missing > 0 else "")
        + "\n\n" + table(headings, lines)
    )  # fmt: skip


def _speed(timings: list[Row]) -> str:
    if not timings:
        return ""
    means = {name: statistics.mean(timing[name] for timing in timings) for name in ("ms", "speedup")}
    return f"{means['ms']:.2f} ms, {means['speedup']:.2f}x"


if __name__ == "__main__":
    main()
