"""Quantization-aware training of ResNet-20 on CIFAR-10: quantizers, self-distillation and bits, three seeds each.

    PYTHONPATH=src:benchmarks python benchmarks/qat_cifar.py [--device cuda] [--epochs 30] [--jobs 8] [--seeds 0 1 2]

The images are the lossy JPEG copies of the shared folder, on which the published network loses ten points; so the dense
network is trained on them first, from the published weights, with the same epochs, and every row starts from it. All
rows have the same optimizer, schedule and augmentation and differ in the quantizers only. First convolution, classifier
and the 1x1 convolutions of shortcuts stay in float. PACT starts at the level of the first batch, or at the published
10 in rows that say so; `--sweep` adds other weights and temperatures of SPEQ's loss. Accuracy is that of the packed
network on the 10,000 test images. Every row is a process of its own. `--resume` with the `--folder` of a cut-off run
adds the rows that it lacks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar_resnet import PROCESSOR, write_model
from common import previous_rows, table, write
from qat_runs import Row, add_options, apply_step, mean_and_seeds, run_cells, train_cells
from torch import Tensor
from train_runs import cifar10

from smelt.compression.distillation.losses import Labels
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.training_run import process_group
from smelt.models.load import load
from smelt.models.model import Model
from smelt.train.trainer.config import CheckpointConfig, EvaluateConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from smelt.train.trainer.tasks import TrainingTask
from smelt.train.trainer.trainer import Trainer

LR, WEIGHT_DECAY, BATCH_SIZE = 0.04, 1e-4, 256
PACT = {"quantizer": "pact"}
PUBLISHED = ", alpha from 10"  # rows whose clipping levels start where the paper's do, not at that of the first batch
SPEQ = {f"PACT + SAWB, SPEQ u = {u:g}": {"method": "speq", "probability": u} for u in (0.5, 1.0, 0.0)}
PACT_ROWS: dict[str, dict[str, Any]] = {
    "PACT (weights as DoReFa)": {"method": "qat", "weights": {"quantizer": "dorefa"}, "inputs": PACT},
    "PACT + SAWB": {"method": "qat", "weights": {"quantizer": "sawb"}, "inputs": PACT},
    **SPEQ,
}
SWEEP = {  # of the weight and temperature of SPEQ's loss, which its paper swept and does not give
    f"PACT + SAWB, SPEQ u = 0.5, weight {weight:g}, T = {temperature:g}": {
        "method": "speq", "probability": 0.5,
        "losses": [{"loss": "labels"}, {"loss": "cosine", "weight": weight, "temperature": temperature}],
    }
    for weight, temperature in ((4.0, 1.0), (1.0, 4.0), (4.0, 4.0))
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "min-max": {"method": "qat", "weights": {"quantizer": "minmax"}, "inputs": {"quantizer": "minmax"}},
    "DoReFa": {"method": "qat", "weights": {"quantizer": "dorefa"}, "inputs": {"quantizer": "dorefa"}},
    **PACT_ROWS, **{name + PUBLISHED: row for name, row in PACT_ROWS.items()}, **SWEEP,
}  # fmt: skip
GRID = {
    2: ["min-max", "DoReFa", *PACT_ROWS, *(name + PUBLISHED for name in PACT_ROWS)],
    **{bits: ["min-max", "DoReFa", "PACT + SAWB", "PACT + SAWB" + PUBLISHED] for bits in (3, 4)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, "qat_cifar", seeds=[0, 1, 2], jobs=8)
    parser.add_argument("--epochs", type=float, default=30)
    parser.add_argument("--images", type=int, default=50_000, help="of the training set")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--compile", action="store_true", help="train by torch.compile")
    parser.add_argument("--sweep", action="store_true", help="other weights and temperatures of SPEQ's loss, too")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    options = parser.parse_args()
    if options.cells is not None:
        train_cells(options.cells, lambda cell: train_row(cell, options))
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        options.folder.mkdir(parents=True, exist_ok=True)
        cifar10(options.folder)
        rows = previous_rows(options.name, options.resume)
        done = {key(row) for row in rows}
        dense = {"row": "dense", "bits": 32, "seed": 0}
        cells = [
            {"row": name, "bits": bits, "seed": seed}
            for seed in options.seeds for bits in options.bits for name in rows_of(bits, options)
            if (name, bits, seed) not in done
        ]  # fmt: skip
        flags = ["--device", options.device, "--epochs", str(options.epochs), "--images", str(options.images)]
        flags += ["--folder", str(options.folder)] + ["--compile"] * options.compile
        if not (options.folder / "dense").exists():  # a resumed run may have another folder
            trained = list(run_cells(__file__, [[dense]], 1, flags))
            rows = rows if key(dense) in done else trained
        for row in run_cells(__file__, [[cell] for cell in cells], options.jobs, flags):
            rows.append(row)
            write(options.name, rows, text(rows, options))


def rows_of(bits: int, options: argparse.Namespace) -> list[str]:
    return GRID[bits] + [name for name in SWEEP if options.sweep and bits == 2]


def key(row: Row) -> tuple[str, int, int]:
    return row["row"], row["bits"], row["seed"]


def images(folder: Path, split: str, device: str, count: int | None = None) -> dict[str, Tensor]:
    """Return normalized pixels and labels on the device."""
    with np.load(folder / "cifar10.npz") as archive:
        pixels, labels = archive[f"x_{split}"][:count], archive[f"y_{split}"][:count]
    mean, std = (torch.tensor(PROCESSOR[f"image_{name}"]).view(1, 3, 1, 1) for name in ("mean", "std"))
    values = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    return {"pixel_values": ((values - mean) / std).to(device), "labels": torch.from_numpy(labels).long().to(device)}


def train_row(cell: Row, options: argparse.Namespace) -> Row:
    dense = options.folder / "dense"
    batch = images(options.folder, "train", options.device, options.images)
    begun = time.monotonic()
    if cell["row"] == "dense":
        model = load(str(write_model(options.folder / "published")), device=options.device)
        before = accuracy(model, options)
        train_dense(model, batch, options)
        model.network.save_pretrained(dense)
        (dense / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        facts: Row = {"published_accuracy": before}
    else:
        model = load(str(dense), device=options.device)
        facts = apply_step(settings(cell["row"], cell["bits"], options), model, [batch], cell["seed"])
    seconds = time.monotonic() - begun
    return {**cell, "accuracy": accuracy(model, options), "seconds": seconds, "compiled": options.compile, **facts}


def settings(row: str, bits: int, options: argparse.Namespace) -> Row:
    """Return the step of the recipe of a row, with so many bits for weights and activations."""
    step = {**ROWS[row]}
    if step["method"] == "speq":
        step |= {"weights": {"quantizer": "sawb"}, "inputs": PACT}
    weights, inputs = {**step["weights"]}, {**step["inputs"], "bits": bits}
    if row.endswith(PUBLISHED):
        inputs["alpha"] = 10.0
    weights = (
        {**weights, "weight_format": f"int{bits}/tensor"}
        if weights["quantizer"] == "minmax"
        else {**weights, "bits": bits}
    )
    optimizer = {"name": "sgd", "lr": LR, "momentum": 0.9, "weight_decay": WEIGHT_DECAY}
    training = {"epochs": options.epochs, "batch_size": BATCH_SIZE, "optimizer": optimizer, "augment": True,
                "compile": options.compile}  # fmt: skip
    return {**step, "weights": weights, "inputs": inputs, **training, "exclude": ["shortcut"], "max_grad_norm": None}


def train_dense(model: Model, batch: dict[str, Tensor], options: argparse.Namespace) -> None:
    """Train the float network with the settings of the rows."""
    device = torch.device(options.device)
    train, validation = Samples.from_batches([batch], device, augment=True, seed=0).split(0.05)
    config = TrainConfig(
        model="dense", task="images", batch_size=BATCH_SIZE, steps=int(options.epochs * len(train)) // BATCH_SIZE + 1,
        optimizer=OptimizerConfig("sgd", lr=LR, momentum=0.9, weight_decay=WEIGHT_DECAY), schedule=ScheduleConfig(),
        gradients="none", evaluate=EvaluateConfig(samples=100_000), checkpoint=CheckpointConfig(every=None),
        device=device.type, compile=options.compile,
    )  # fmt: skip
    task = TrainingTask(Student(model.network, (Labels(),), None), train, validation, True, saves_model=False)
    with tempfile.TemporaryDirectory() as folder, process_group(device):
        Trainer(config, Path(folder) / "run", device, resume=False, resplit=False, task=task).train()
    model.network.eval()


@torch.no_grad()
def accuracy(model: Model, options: argparse.Namespace, count: int | None = None, batch_size: int = 1000) -> float:
    """Return the accuracy on so many test images, by default all."""
    test = images(options.folder, "test", options.device, count)
    parts = zip(test["pixel_values"].split(batch_size), test["labels"].split(batch_size), strict=True)
    return sum(int((model.network(x).logits.argmax(-1) == y).sum()) for x, y in parts) / len(test["labels"])


def text(rows: list[Row], options: argparse.Namespace) -> str:
    dense, *others = rows
    cells = []
    others.sort(key=lambda row: (row["bits"], list(ROWS).index(row["row"]), row["seed"]))
    for bits, name in dict.fromkeys((row["bits"], row["row"]) for row in others):
        same = [row for row in others if (row["bits"], row["row"]) == (bits, name)]
        accuracies = [100 * row["accuracy"] for row in same]
        mean = statistics.mean(accuracies)
        alphas = [row["mean_alpha_curve"] for row in same if "mean_alpha_curve" in row]
        cells.append([
            f"W{bits}A{bits}", name, *mean_and_seeds(accuracies),
            f"{mean - 100 * dense['accuracy']:+.2f}", f"{max(row['conversion_error'] for row in same):.0e}",
            f"{alphas[0][0][1]:.2f} to {alphas[0][-1][1]:.2f}" if alphas else "",
        ])  # fmt: skip
    headings = ["bits", "method", "accuracy, %", "by seed", "against float", "packed differs by", "mean alpha"]
    total = 1 + len(options.seeds) * sum(len(rows_of(bits, options)) for bits in GRID)
    num_compiled = sum(row.get("compiled", False) for row in rows)
    compiled = f" {num_compiled} rows were trained by torch.compile, the others without." if num_compiled else ""
    missing = "" if len(rows) >= total else f" {len(rows)} of {total} rows: the run was cut off."
    return (
        f"# QAT of ResNet-20 on CIFAR-10 (JPEG copies)\n\nFloat: {100 * dense['accuracy']:.2f} % after training on the "
        f"copies, {100 * dense['published_accuracy']:.2f} % before. {options.epochs:g} epochs of {options.images:,} "
        f"images, batch {BATCH_SIZE}, SGD with lr {LR} and a cosine.{compiled}{missing}\n\n" + table(headings, cells)
    )


if __name__ == "__main__":
    main()
