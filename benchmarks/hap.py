"""HAP at half of the parameters: CIFAR-10 ResNets and MiniLM on SST-2, with and without implants, and baselines.

    PYTHONPATH=src:benchmarks python benchmarks/hap.py [--device cuda] [--jobs 6] [--seeds 0 1 2] [--resume]
    PYTHONPATH=src:benchmarks python benchmarks/hap.py --smoke --device cpu --jobs 1

Every row removes units from the same network until the budget is met, implants included, and is then fine-tuned with
the same data, epochs and optimizer, with the BatchNorm statistics of training; nothing is fitted in closed form
(`repair: none`). Accuracy is that of the artifact after saving and loading, on the 10,000 test images or the
development set, before and after fine-tuning. Latency is that of the network on CPU with one thread, in turns with the
dense one. Seeds differ in calibration samples, probes, random units and the order of fine-tuning.

The images are the lossy JPEG copies of the shared folder, on which the published networks lose ten points and are at no
minimum; so the dense networks are trained on them first, from the published weights of ResNet-20 and ResNet-56, as the
rows are. What an implant recovers is the difference of two rows: one with it, and one that keeps the same units without
it and so has fewer parameters. `--folder` keeps the dense networks; `--resume` keeps finished rows.
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
from cifar_resnet import write_model
from common import minilm_sst2, table
from finetune_glue import glue_rows
from qat_cifar import accuracy, images
from qat_runs import Grid, Row, add_options, flags, mean_and_seeds, train_cells, work_folder
from train_runs import cifar10

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import Batch, labeled_batches
from smelt.measure.cost import block_parameters
from smelt.measure.task import evaluate_task
from smelt.models.artifact import save_artifact
from smelt.models.implants import implants_of
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.surgery import keep_units

DENSE, IMPLANT = "dense", 0.1
ROWS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "magnitude": {"method": "magnitude"},
    "fisher": {"method": "fisher", "repair": "none"},
    "hap": {"method": "hap"},
    "hap as published": {"method": "hap", "weights": "rows", "ranking": "unit"},
    "hap + implant": {"method": "hap", "implant": IMPLANT},
}
WITHOUT = "hap + implant, implant left out"
RESNETS = {"resnet20": 20, "resnet56": 56}
NETWORKS = (*RESNETS, "minilm-sst2")
MAX_LENGTH = 128


def main() -> None:
    options = read_options()
    if options.cells is not None:
        train_cells(options.cells, lambda cell: run_cell(cell, options))
        return
    with work_folder(options):
        cifar10(options.folder)
        sizes = ("budget", "images", "texts", "dense_epochs", "epochs", "probes", "calibration")
        grid = Grid(__file__, options, flags(options, *sizes, "smoke"), key, text)
        dense = [{"network": network, "row": DENSE, "seed": 0} for network in options.networks]
        grid.prepare([cell for cell in dense if not (options.folder / cell["network"] / "smelt.json").exists()])
        cells = [
            {"network": network, "row": name, "seed": seed}
            for seed in options.seeds for network in reversed(options.networks) for name in options.rows
        ]  # fmt: skip
        grid.run(grid.missing([cell for cell in cells if cell["row"] != WITHOUT]))
        last = [cell for cell in cells if cell["row"] == WITHOUT and units_file(cell, options).exists()]
        grid.run(grid.missing(last))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "hap", seeds=[0, 1, 2], jobs=6)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, WITHOUT], default=[*ROWS, WITHOUT])
    parser.add_argument("--budget", type=float, default=0.5, help="share of the parameters")
    parser.add_argument("--images", type=int, default=50_000, help="of the training set")
    parser.add_argument("--texts", type=int, default=16_000, help="of the training set")
    parser.add_argument("--dense-epochs", type=float, default=8, help="of the ResNets on the copies")
    parser.add_argument("--epochs", type=float, default=4, help="of fine-tuning on images; a quarter of them on texts")
    parser.add_argument("--probes", type=int, default=50)
    parser.add_argument("--calibration", type=int, default=512, help="samples")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--smoke", action="store_true", help="tiny, writes no results")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.images, options.texts, options.epochs, options.dense_epochs = [0], 256, 64, 1, 1
        options.probes, options.calibration = 1, 16
        options.networks = [name for name in options.networks if name != "resnet56"]
        options.rows = ["magnitude", "hap + implant", WITHOUT]
    return options


def key(row: Row) -> tuple[str, str, int]:
    return row["network"], row["row"], row["seed"]


def run_cell(cell: Row, options: argparse.Namespace) -> Row:
    torch.set_num_threads(1)
    network, begun = cell["network"], time.monotonic()
    dense = options.folder / network
    if cell["row"] == DENSE:
        model, facts = dense_model(network, options), {}
        dense.mkdir(parents=True, exist_ok=True)
        save_artifact(model, dense)
        return {**cell, **facts, "after": score(load(str(dense), device=options.device), network, options)}
    model = load(str(dense), device=options.device)
    full = block_parameters(model.anatomy)
    facts = prune(model, cell, options)
    seconds = time.monotonic() - begun
    row = {
        **cell, "parameters": block_parameters(model.anatomy) / full, "pruning_seconds": seconds, **facts,
        "before": reloaded(model, network, options),
    }  # fmt: skip
    training = apply(
        fine_tuning(network, options.epochs), model, training_batches(model, network, options), cell["seed"]
    )
    return {
        **row, "after": reloaded(model, network, options), "final_loss": training["final_loss"],
        "seconds": time.monotonic() - begun, **latency(dense, model, network, options),
    }  # fmt: skip


def prune(model: Model, cell: Row, options: argparse.Namespace) -> Row:
    """Remove units; return facts, with the units that an implanted network keeps beside its implants."""
    if cell["row"] == WITHOUT:
        for index, units in enumerate(json.loads(units_file(cell, options).read_text())):
            keep_units(model.network, model.anatomy.parts[index], units)
        return {}
    step = {**ROWS[cell["row"]], "budget": {"parameters": options.budget}}
    if step["method"] == "hap":
        step["probes"] = options.probes
    facts = apply(step, model, calibration(model, cell, options), cell["seed"])
    facts = {name: facts[name] for name in ("implanted_units", "trace_error") if name in facts}
    if step.get("implant"):
        implanted = {entry["part"]: entry.get("channels", 0) for entry in implants_of(model.anatomy)}
        counts = [part.units - implanted.get(part.name, 0) for part in model.anatomy.parts]
        kept = [part.kept[:count] for part, count in zip(model.anatomy.parts, counts, strict=True)]
        units_file(cell, options).write_text(json.dumps(kept))
    return facts


def units_file(cell: Row, options: argparse.Namespace) -> Path:
    """Return the file of the units that a network with implants keeps beside them."""
    path: Path = options.folder / f"units-{cell['network']}-{cell['seed']}.json"
    return path


def apply(step: Row, model: Model, batches: list[Batch], seed: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        context = MethodContext(batches=batches, seed=seed, folder=Path(folder))
        facts: Row = METHODS.build(step).apply(model, context)
    return facts


def dense_model(network: str, options: argparse.Namespace) -> Model:
    if network not in RESNETS:
        return minilm_sst2(options.device)
    with tempfile.TemporaryDirectory() as folder:
        model = load(str(write_model(Path(folder) / "published", RESNETS[network])), device=options.device)
    apply(fine_tuning(network, options.dense_epochs), model, training_batches(model, network, options), 0)
    return model


def fine_tuning(network: str, epochs: float) -> Row:
    """Return the step that trains a row: the optimizer of the paper on images, with a cosine."""
    common = {"method": "finetune", "select": "last", "checkpoint_every": 1_000_000_000}
    if network not in RESNETS:
        return {**common, "epochs": epochs / 4, "batch_size": 32, "optimizer": {"lr": 5e-5}}
    optimizer = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": 4e-4}
    return {
        **common, "epochs": epochs, "batch_size": 128, "optimizer": optimizer, "augment": True, "max_grad_norm": None,
    }  # fmt: skip


def training_batches(model: Model, network: str, options: argparse.Namespace) -> list[Batch]:
    if network in RESNETS:
        return [images(options.folder, "train", options.device, options.images)]
    return text_batches(model, options.texts, 32, 0)


def calibration(model: Model, cell: Row, options: argparse.Namespace) -> list[Batch]:
    """Return samples that differ between seeds, on the device."""
    if cell["network"] not in RESNETS:
        batches = text_batches(model, options.calibration, 32, cell["seed"])
        return [{name: tensor.to(options.device) for name, tensor in batch.items()} for batch in batches]
    batch = images(options.folder, "train", options.device, options.images)
    chosen = np.random.default_rng(cell["seed"]).choice(len(batch["labels"]), options.calibration, replace=False)
    rows = torch.from_numpy(chosen).to(options.device)
    parts = {name: tensor[rows].split(256) for name, tensor in batch.items()}
    return [{name: pieces[index] for name, pieces in parts.items()} for index in range(len(parts["labels"]))]


def text_batches(model: Model, count: int, batch_size: int, seed: int) -> list[Batch]:
    train = glue_rows("sst2", "train")
    return labeled_batches(
        train, model.tokenizer, samples=count, max_length=MAX_LENGTH, batch_size=batch_size, seed=seed
    )


def reloaded(model: Model, network: str, options: argparse.Namespace) -> float:
    """Return the accuracy of the model after saving and loading it."""
    with tempfile.TemporaryDirectory() as folder:
        save_artifact(model, Path(folder))
        return score(load(folder, device=options.device), network, options)


@torch.no_grad()
def score(model: Model, network: str, options: argparse.Namespace) -> float:
    if network not in RESNETS:
        limit = 64 if options.smoke else None
        dev = glue_rows("sst2", "dev")
        return evaluate_task(model, dev, metric="accuracy", max_length=MAX_LENGTH, batch_size=64, limit=limit).value
    return accuracy(model, options, 64 if options.smoke else None)


@torch.no_grad()
def latency(dense: Path, model: Model, network: str, options: argparse.Namespace) -> Row:
    """Return milliseconds per sample on CPU with one thread, and the speedup over the dense network, timed in turns."""
    networks = [model.network.cpu().eval(), load(str(dense)).network]
    if network in RESNETS:
        inputs = {"pixel_values": images(options.folder, "test", "cpu", 8)["pixel_values"]}
    else:
        inputs = {name: t.cpu() for name, t in text_batches(model, 8, 8, 0)[0].items() if name != "labels"}
    times: list[list[float]] = [[], []]
    for _ in range(3 if options.smoke else 12):
        for each, seconds in zip(networks, times, strict=True):
            begun = time.perf_counter()
            each(**inputs)
            seconds.append(time.perf_counter() - begun)
    ours, theirs = (statistics.median(seconds) for seconds in times)
    return {"ms": 1000 * ours / 8, "speedup": theirs / ours}


def text(rows: list[Row], options: argparse.Namespace) -> str:
    names = [DENSE, *ROWS, WITHOUT]
    rows = sorted(rows, key=lambda row: (NETWORKS.index(row["network"]), names.index(row["row"]), row["seed"]))
    cells = []
    for network, name in dict.fromkeys((row["network"], row["row"]) for row in rows):
        same = [row for row in rows if (row["network"], row["row"]) == (network, name)]
        after = [100 * row["after"] for row in same]
        if name == DENSE:
            cells.append([network, name, "1.00", "", "", *mean_and_seeds(after), "", ""])
            continue
        columns = {column: statistics.mean(row[column] for row in same) for column in ("parameters", "ms", "speedup")}
        cells.append([
            network, name, f"{columns['parameters']:.3f}", *mean_and_seeds([100 * row["before"] for row in same]),
            *mean_and_seeds(after), f"{columns['ms']:.2f}", f"{columns['speedup']:.2f}x",
        ])  # fmt: skip
    headings = [
        "network", "method", "parameters", "before fine-tuning, %", "by seed", "after, %", "by seed", "ms", "speedup"
    ]  # fmt: skip
    networks = list(dict.fromkeys(row["network"] for row in rows))
    total = len(networks) * (1 + len(options.seeds) * len(options.rows))
    missing = "" if len(rows) >= total else f" {total - len(rows)} rows are missing."
    return (
        f"# HAP at {100 * options.budget:g} % of the parameters\n\nFine-tuning: {options.epochs:g} epochs of "
        f"{options.images:,} images (batch 128, SGD, lr 0.02, cosine) or {options.epochs / 4:g} of {options.texts:,} "
        f"texts (batch 32, AdamW, lr 5e-5). Dense ResNets: {options.dense_epochs:g} epochs on the copies. "
        f"{options.calibration} calibration samples, {options.probes} probes per mini-batch; implants replace "
        f"{100 * IMPLANT:g} % of the removed units. Trained on {options.device}; times: CPU, one thread, batch 8."
        f"{missing}\n\n" + table(headings, cells)
    )  # fmt: skip


if __name__ == "__main__":
    main()
