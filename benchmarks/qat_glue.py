"""Quantization-aware training of MiniLM-L6 on GLUE: ternary and 2-bit weights with int8 activations.

    PYTHONPATH=src:benchmarks python benchmarks/qat_glue.py [--device cuda] [--steps 300] [--jobs 8] [--seeds 0 1]
    PYTHONPATH=src:benchmarks python benchmarks/qat_glue.py --smoke --device cpu --jobs 1

Each row adds a term to the loss against the float network, which is the teacher and the start of the student: its
predictions, the hidden states, and attention maps, outputs, or scores and outputs. The last trained row has the losses
of the one before and Teacher Intervention (TI-G) in its first steps. Post-training rows have the same formats. The
float network of SST-2 is the one of the shared folder; those of CoLA and MRPC are fine-tuned here first, as
`finetune_glue.py` does. The linear layers of the blocks are quantized; embeddings, pooler and classifier stay in float.
The metric is that of the packed network on the development set. `--resume` adds what a cut-off run lacks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import minilm_sst2, table
from finetune_glue import TASKS, fine_tune, glue_rows, with_head
from qat_runs import Grid, Row, add_options, apply_step, flags, mean_and_seeds, train_cells, work_folder

from smelt.compression.distillation.network_training import VALIDATION
from smelt.data import Batch, labeled_batches
from smelt.measure.task import evaluate_task
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model

LR, WEIGHT_DECAY, BATCH_SIZE, MAX_LENGTH, FINE_TUNING_EPOCHS = 2e-4, 0.01, 64, 128, 4
INTERVENTION_STEPS = 60  # of TI-G
CALIBRATION = 512  # texts for post-training rows
WINDOW = 20  # steps that a loss is averaged over
WEIGHTS: dict[str, Row] = {
    "ternary": {"quantizer": "twn"},
    "2-bit": {"quantizer": "lsq", "weight_format": "int2/64"},
}
FORMATS = {"ternary": "ternary", "2-bit": "int2/64"}
FLOAT, RTN, GPTQ = "float", "post-training: round to nearest", "post-training: GPTQ"
PLAIN, TI = "+ representation, scores and output", "+ representation, scores and output; TI-G"
LOSSES = {
    "prediction": ["logits"],
    "+ representation": ["logits", "hidden-states"],
    "+ representation and map": ["logits", "hidden-states", "attention-map"],
    "+ representation and output": ["logits", "hidden-states", "attention-output"],
    PLAIN: ["logits", "hidden-states", "attention-score", "attention-output"],
    TI: ["logits", "hidden-states", "attention-score", "attention-output"],
}
NAMES = [RTN, GPTQ, *LOSSES]


def main() -> None:
    options = read_options()
    if options.cells is not None:
        train_cells(options.cells, lambda cell: train_cell(cell, options))
        return
    with work_folder(options):
        grid = Grid(__file__, options, flags(options, "steps", "rows", "smoke"), key, text)
        grid.prepare([{"task": task, "weights": "float", "row": FLOAT, "seed": 0} for task in options.tasks])
        grid.run(grid.missing(cells(options)))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "qat_glue", seeds=[0, 1], jobs=8)
    parser.add_argument("--steps", type=int, default=300, help=f"of {BATCH_SIZE} texts")
    parser.add_argument("--rows", type=int, default=20_000, help="texts of the training set, at most")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["sst2", "cola", "mrpc"])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--smoke", action="store_true", help="two steps of three rows of one task; no results to keep")
    options = parser.parse_args()
    if options.smoke:
        options.tasks, options.weights, options.seeds = ["mrpc"], ["ternary"], [0]
        options.steps, options.rows = 2, 16
    return options


def cells(options: argparse.Namespace) -> list[Row]:
    """Return the cells; post-training has one seed, since nothing is shuffled."""
    return [
        {"task": task, "weights": weights, "row": name, "seed": seed}
        for seed in options.seeds for task in options.tasks for weights in options.weights
        for name in ([RTN, PLAIN, TI] if options.smoke else NAMES)
        if name in LOSSES or seed == options.seeds[0]
    ]  # fmt: skip


def key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in ("task", "weights", "row", "seed"))


def train_cell(cell: Row, options: argparse.Namespace) -> Row:
    folder, task = options.folder / cell["task"], TASKS[cell["task"]]
    begun = time.monotonic()
    if cell["row"] == FLOAT:
        model, facts = float_model(cell["task"], options), {}
        folder.mkdir(parents=True, exist_ok=True)
        save_artifact(model, folder)
    else:
        model = load(str(folder), device=options.device)
        facts = apply_step(settings(cell, options), model, training_batches(cell, model, options), cell["seed"])
    seconds = time.monotonic() - begun
    dev = glue_rows(cell["task"], "dev")
    limit = 16 if options.smoke else None
    quality = evaluate_task(model, dev, metric=task.metric, max_length=MAX_LENGTH, batch_size=128, limit=limit)
    return {**cell, "metric": task.metric, "value": quality.value, "seconds": seconds, **facts}


def float_model(task: str, options: argparse.Namespace) -> Model:
    if task == "sst2":
        return minilm_sst2(options.device)
    torch.manual_seed(0)
    model = with_head(TASKS[task].outputs, options.device)
    train = glue_rows(task, "train")
    if options.smoke:
        train = train.take(range(options.rows))
    fine_tune(model, train, 1 if options.smoke else FINE_TUNING_EPOCHS, seed=0)
    return model


def training_batches(cell: Row, model: Model, options: argparse.Namespace) -> list[Batch]:
    train = glue_rows(cell["task"], "train")
    samples = min(len(train), options.rows, *([] if cell["row"] in LOSSES else [CALIBRATION]))
    return labeled_batches(
        train, model.tokenizer, samples=samples, max_length=MAX_LENGTH, batch_size=BATCH_SIZE, seed=0
    )


def settings(cell: Row, options: argparse.Namespace) -> Row:
    """Return the step of the recipe of a cell."""
    if cell["row"] not in LOSSES:
        method = "rtn" if cell["row"] == RTN else "gptq"
        activations = {"input_activations": "int8", "static_activations": True}
        return {"method": method, "format": FORMATS[cell["weights"]], **activations}
    rows = min(len(glue_rows(cell["task"], "train")), options.rows)
    step: dict[str, Any] = {
        "method": "teacher-intervention" if cell["row"] == TI else "qat", "teacher": "source",
        "weights": WEIGHTS[cell["weights"]], "inputs": {"quantizer": "minmax", "bits": 8, "signed": True},
        "losses": [{"loss": name} for name in LOSSES[cell["row"]]], "batch_size": min(BATCH_SIZE, rows // 4),
        "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY}, "schedule": {"warmup_steps": options.steps // 10},
        "checkpoint_every": options.steps, "select": "last",
        "precision": "bf16" if options.device.startswith("cuda") else "off",
    }  # fmt: skip
    trained = rows - max(round(VALIDATION * rows), 1)
    step["epochs"] = (options.steps - 0.5) * step["batch_size"] / trained  # the last step begins, so it is counted
    if cell["row"] == TI:
        step["intervention_steps"] = min(INTERVENTION_STEPS, options.steps // 2)
    return step


def text(rows: list[Row], options: argparse.Namespace) -> str:
    rows = sorted(rows, key=lambda row: (row["task"], row["weights"], [FLOAT, *NAMES].index(row["row"]), row["seed"]))
    lines = []
    for task, weights, name in dict.fromkeys((row["task"], row["weights"], row["row"]) for row in rows):
        same = [row for row in rows if (row["task"], row["weights"], row["row"]) == (task, weights, name)]
        errors = [f"{row['conversion_error']:.0e}" for row in same if "conversion_error" in row]
        losses = [row["final_loss"] for row in same if "final_loss" in row]
        lines.append([
            task, same[0]["metric"], weights, name, *mean_and_seeds([100 * row["value"] for row in same]),
            f"{statistics.mean(losses):.3f}" if losses else "", ", ".join(steps_to_reach(rows, same)),
            max(errors, key=float) if errors else "", f"{statistics.mean(row['seconds'] for row in same):.0f}",
        ])  # fmt: skip
    headings = ["task", "metric", "weights", "method", "mean", "by seed", "final loss"]
    headings += ["steps to the loss of plain QAT", "packed differs by", "seconds"]
    total = len(options.tasks) + len(cells(options))
    missing = "" if len(rows) >= total else f" {len(rows)} of {total} rows: the run was cut off."
    return (
        f"# QAT of MiniLM-L6 on GLUE\n\n{options.steps} steps of {BATCH_SIZE} texts, AdamW with lr {LR:g}, warmup and "
        f"a cosine; int8 activations; {options.jobs} cells at a time on {options.device}. The loss of a row is the sum "
        f"of its terms. Steps to the loss of plain QAT: when the mean loss of {WINDOW} steps is first below the final "
        f"loss of `{PLAIN}`, by seed.{missing}\n\n" + table(headings, lines)
    )


def steps_to_reach(rows: list[Row], same: list[Row]) -> list[str]:
    """Return, for each row with Teacher Intervention, when it reaches the final loss of the row without it.

    While the teacher intervenes, the loss is not the student's own, so these steps do not count.
    """
    steps = []
    for row in (row for row in same if row["row"] == TI):
        plain = next((other for other in rows if key(other) == key({**row, "row": PLAIN})), None)
        if plain is None:
            continue
        curve = row["loss_curve"]
        window = max(WINDOW * len(curve) // row["steps"], 1)
        means = [
            (curve[last][0], statistics.mean(loss for _, loss in curve[last - window + 1 : last + 1]))
            for last in range(window - 1, len(curve))
            if curve[last - window + 1][0] > INTERVENTION_STEPS
        ]
        reached = next((step for step, loss in means if loss <= plain["final_loss"]), None)
        steps.append("not reached" if reached is None else f"{reached} of {row['steps']}")
    return steps


if __name__ == "__main__":
    main()
