"""Does training with compressed gradients converge? Held-out loss against steps and against bytes, all methods.

    PYTHONPATH=src:benchmarks python benchmarks/train_convergence.py [--tasks gpt] [--methods none,exdyna] \
        [--densities 0.01,0.001] [--seeds 0,1,2] [--seconds 600] [--tune]

Four ranks on one machine (gloo), one thread each, in Smelt's own trainer. Small models: what is shown is how methods
compare, not what a model can reach. The learning rate was tuned once for plain DDP (`--tune`, seed 0) and is the same
for all methods. Finished cells are kept in results/train_convergence.json and are not run again, so that a call with
`--seconds` does a part of the work and the next one continues; `--text` only rewrites the tables.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from common import mean, previous_rows, shared, table, write
from train_runs import WORKERS, Cell, cifar10, make_parser, run_cells, wikitext2, words

NAME = "train_convergence"
STEPS = {"gpt": 240, "gpt-long": 960, "gpt-sgd": 240, "resnet": 300, "cifar": 300}
RATES = {
    "gpt": 1e-3,
    "gpt-long": 1e-3,
    "gpt-sgd": 0.1,
    "resnet": 0.1,
    "cifar": 0.1,
}  # the best of those below, for plain DDP
TRIED: dict[str, list[float]] = {
    "gpt": [3e-4, 1e-3, 3e-3, 1e-2],
    "gpt-long": [],
    "gpt-sgd": [0.03, 0.1, 0.3, 1.0],
    "resnet": [0.03, 0.1, 0.3],
    "cifar": [0.03, 0.1, 0.3],
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "gpt": {"name": "adamw"},
    "gpt-long": {"name": "adamw"},
    "gpt-sgd": {"name": "sgd", "momentum": 0.9},
    "resnet": {"name": "sgd", "momentum": 0.9, "nesterov": True},
    "cifar": {"name": "sgd", "momentum": 0.9, "nesterov": True},
}
POINTS = 6  # evaluations of a run
WARMUP = 30  # steps
SPARSE = ["exdyna", "micro", "deft", "topk", "cltk", "sage", "sidco", "dgc", "threshold", "randomk"]
OTHERS = ["none", "bf16", "powersgd", "qsgd", "adacomp", "efsign", "onebit"]
VARIANT_METHODS = ["none", "powersgd", "exdyna", "topk", "dgc"]  # of the tasks that are variants
VARIANTS = ["gpt-long", "gpt-sgd"]
DENSITIES = [0.01, 0.001]
POWERSGD_WARMUP = 10  # steps; PyTorch's default of 1,000 is longer than these runs
TITLES = {
    "gpt": "A language model on WikiText-2, AdamW",
    "gpt-long": "The same, four times as long",
    "gpt-sgd": "The same, SGD with momentum 0.9",
    "resnet": "A ResNet on MNIST, SGD with Nesterov momentum 0.9",
    "cifar": "The same on CIFAR-10 (JPEG copies)",
}
IMAGES = ["resnet", "cifar"]
Row = dict[str, Any]


def main() -> None:
    options = _options()
    rows: list[Row] = previous_rows(NAME, True)
    done = {row["name"] for row in rows}
    start = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cells = [] if options.text else _cells(options, Path(folder))
        open_cells = [cell for cell in cells if cell["name"] not in done]
        print(f"{len(open_cells)} cells to run, {len(cells) - len(open_cells)} are done", flush=True)
        for cell in run_cells(open_cells) if open_cells else []:
            rows.append(_row(cell))
            write(NAME, rows, _text(rows))
            if perf_counter() - start > options.seconds:
                break
    write(NAME, rows, _text(rows))


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--tasks", type=words, default=list(STEPS))
    parser.add_argument("--methods", type=words, help="all, or with --tune plain DDP")
    parser.add_argument("--densities", type=lambda text: list(map(float, words(text))), default=DENSITIES)
    parser.add_argument("--tune", action="store_true", help="several learning rates instead of the grid")
    return parser.parse_args()


def _cells(options: argparse.Namespace, folder: Path) -> list[Cell]:
    cells = []
    data = {task: _data(task, folder) for task in options.tasks}
    if options.tune:
        for task, method in product(options.tasks, options.methods or ["none"]):
            for density, rate in product(options.densities if method in SPARSE else [None], TRIED[task]):
                cells.append(_cell(task, method, density, 0, rate, data[task]))
        return cells
    for seed in options.seeds:
        for task in options.tasks:
            for method in options.methods or OTHERS + SPARSE:
                if task in VARIANTS and method not in VARIANT_METHODS:
                    continue
                for density in options.densities if method in SPARSE else [None]:
                    cells.append(_cell(task, method, density, seed, RATES[task], data[task]))
    return cells


def _cell(task: str, method: str, density: float | None, seed: int, rate: float, data: dict[str, Any]) -> Cell:
    steps = STEPS[task]
    optimizer = OPTIMIZERS[task]
    gradients: dict[str, Any] = {"method": method}
    if density is not None:
        gradients["density"] = density
    if method == "powersgd":
        gradients["warmup_steps"] = POWERSGD_WARMUP
    if method == "dgc" and optimizer["name"] == "adamw":
        gradients["momentum"] = 0.0  # Adam has momentum
    elif method == "dgc":  # applies momentum itself
        gradients |= {"momentum": 0.9, "nesterov": optimizer.get("nesterov", False)}
        optimizer = {"name": "sgd"}
    config = {
        **(_images(data) if task in IMAGES else _language(data)),
        "steps": steps,
        "seed": seed,
        "device": "cpu",
        "gradients": gradients,
        "optimizer": {**optimizer, "lr": rate},
        "schedule": {"name": "cosine", "warmup_steps": WARMUP},
        "evaluate": {"every": steps // POINTS, "samples": 512 if task in IMAGES else 256},
        "checkpoint": {"every": None, "keep": 1},
    }
    name = f"{task} {method} {'' if density is None else f'{density:g} '}seed {seed} rate {rate:g}"
    return {"name": name, "config": config, "stop_at": None}


def _data(task: str, folder: Path) -> dict[str, Any]:
    if task in IMAGES:
        return {"train": str(shared() / "data/mnist/mnist.npz" if task == "resnet" else cifar10(folder))}
    train, held_out = wikitext2(folder, 1.0)
    return {"train": str(train), "evaluate": str(held_out), "seq_len": 64}


def _language(data: dict[str, Any]) -> dict[str, Any]:
    model = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return {"task": "language", "model": model, "data": data, "batch_size": 4, "max_grad_norm": 1.0}


def _images(data: dict[str, Any]) -> dict[str, Any]:
    model = {
        "model_type": "resnet",
        "embedding_size": 32,
        "hidden_sizes": [32, 64, 128],
        "depths": [1, 1, 1],
        "layer_type": "basic",
    }
    return {"task": "images", "model": model, "data": data, "batch_size": 16}


def _row(cell: Cell) -> Row:
    """Add the parts of the name, and build-up as a mean over each twelfth of the run."""
    words = cell["name"].split()
    density = float(words[2]) if words[2] != "seed" else None
    position = words.index("seed")
    counts = cell.pop("build_ups")
    size = max(len(counts) // 12, 1)
    windows = [round(mean(counts[start : start + size]), 3) for start in range(0, len(counts), size)]
    parts = {"task": words[0], "method": words[1], "density": density}
    return {**cell, **parts, "seed": int(words[position + 1]), "rate": float(words[-1]), "build_up_windows": windows}


def _text(rows: list[Row]) -> str:
    parts = ["# Training with compressed gradients: convergence", _introduction()]
    for task in STEPS:
        own = [row for row in rows if row["task"] == task]
        grid = [row for row in own if row["rate"] == RATES[task]]
        if grid:
            parts += [f"## {TITLES[task]}", _task_words(grid), _table(grid, task), _curves(grid)]
        for label, tuned in _grouped([row for row in own if row["seed"] == 0]):
            if len(tuned) > 1:
                ends = [f"{row['rate']:g}: {_loss_words(row)}" for row in sorted(tuned, key=lambda row: row["rate"])]
                parts.append(f"Held-out loss of {label} by learning rate (seed 0): " + "; ".join(ends) + ".")
    return "\n\n".join(parts)


def _introduction() -> str:
    return (
        f"{WORKERS} ranks (gloo, one machine, one thread each) in Smelt's trainer; learning rate tuned for "
        f"plain DDP alone and the same for all; {WARMUP} warmup steps, then a cosine to zero; one bucket for the "
        "whole model, float32 values. Held-out loss: mean over seeds (lowest to highest); above plain: of the same "
        "seeds. Bytes: received per rank, mean of the second half of the steps, plain DDP by arithmetic "
        "of a ring. |I|/(dG) and padding n max k / |I| - 1: means of the second half; the span is over means of each "
        f"twelfth of a run from the second on. powersgd: rank 1, after {POWERSGD_WARMUP} warmup steps. The cells of "
        "CIFAR-10 are of an ARM machine, all others of x86 ones; times are not compared."
    )


def _task_words(grid: list[Row]) -> str:
    first = grid[0]
    batch = "16 images" if first["task"] in IMAGES else "4 x 64 bytes"
    size, number = ("28 x 28", "60,000") if first["task"] == "resnet" else ("32 x 32", "50,000")
    data = (
        "The first million characters of the training part, no sample seen twice; held out: 256 windows of the "
        "validation part. A token is a byte; gradients are clipped at norm 1."
        if first["task"] not in IMAGES
        else f"{size} images, of which a rank's samples are drawn from {number}; held out: the first 512 test images."
    )
    return (
        f"{first['parameters']:,} parameters, {STEPS[first['task']]} steps, {batch} per rank and step, learning rate "
        f"{first['rate']:g}. {data}"
    )


def _grouped(grid: list[Row]) -> list[tuple[str, list[Row]]]:
    """Rows of one method and density together, in the order of the grid; the label of each."""
    groups = []
    for method in OTHERS + SPARSE:
        for density in [None, *DENSITIES]:
            own = [row for row in grid if row["method"] == method and row["density"] == density]
            if own:
                label = "plain DDP" if method == "none" else method
                groups.append((label if density is None else f"{label} {density:g}", own))
    return groups


def _table(grid: list[Row], task: str) -> str:
    dense = {row["seed"]: _last(row)["loss"] for row in grid if row["method"] == "none"}
    plain_bytes = next((row["bytes_a_step"] for row in grid if row["method"] == "none"), None)
    measure = "accuracy" if task in IMAGES else "perplexity"
    cells = []
    for label, own in _grouped(grid):
        good = [row for row in own if row["error"] is None]
        if not good:
            cells.append([label, str(len(own)), "not finite", *["-"] * 6])
            continue
        losses = [_last(row)["loss"] for row in good]
        above = [_last(row)["loss"] - dense[row["seed"]] for row in good if row["seed"] in dense]
        failed = f", {len(own) - len(good)} not finite" if len(good) < len(own) else ""
        size = mean([row["bytes_a_step"] for row in good])
        cells.append(
            [
                label, str(len(own)), f"{mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f}){failed}",
                f"{mean(above):+.3f}" if above else "-",
                f"{mean([_last(row)[measure] for row in good]):.{4 if task in IMAGES else 2}f}",
                f"{size / 1e3:,.1f}", f"{plain_bytes / size:,.1f}x" if plain_bytes else "-",
                _build_up_words(good), _padding_words(good),
            ]
        )  # fmt: skip
    headings = ["method", "seeds", "held-out loss", "above plain", measure]
    return table([*headings, "kB per step", "fewer bytes", "I/(dG)", "padding"], cells)


def _build_up_words(rows: list[Row]) -> str:
    if rows[0]["density"] is None:
        return "-"
    windows = [value for row in rows for value in row["build_up_windows"][1:]]
    return f"{mean([row['build_up'] for row in rows]):.2f} ({min(windows):.2f} to {max(windows):.2f})"


def _padding_words(rows: list[Row]) -> str:
    padding = [row["padding"] for row in rows if row["padding"] is not None]
    return f"{mean(padding):.2f}" if padding else "-"


def _curves(grid: list[Row]) -> str:
    """Loss against steps and bytes: of each point of the run the mean loss, and the megabytes received."""
    points = [point["step"] for point in max((row["curve"] for row in grid), key=len)]
    cells = []
    for label, own in _grouped(grid):
        line = []
        for number, _ in enumerate(points):
            there = [row["curve"][number] for row in own if len(row["curve"]) > number]
            megabytes = mean([each["bytes"] / 1e6 for each in there]) if there else 0.0
            line.append(f"{mean([each['loss'] for each in there]):.3f} / {megabytes:,.3g}" if there else "-")
        cells.append([label, *line])
    words = "Held-out loss after so many steps / megabytes that a rank had received by then."
    return f"{words}\n\n" + table(["method", *(f"{step} steps" for step in points)], cells)


def _last(row: Row) -> dict[str, float]:
    return row["curve"][-1]


def _loss_words(row: Row) -> str:
    return f"{_last(row)['loss']:.3f}" if row["error"] is None else "not finite"


if __name__ == "__main__":
    main()
