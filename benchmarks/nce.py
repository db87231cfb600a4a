"""Channel search for 2 bits (NCE) on ResNet-20 and CIFAR-10, against the unexpanded network and a narrowing search.

    PYTHONPATH=src:benchmarks python benchmarks/nce.py [--device cuda] [--jobs 12] [--seeds 0 1 2] [--resume]
    PYTHONPATH=src:benchmarks python benchmarks/nce.py --smoke --device cpu --jobs 1

The images are the lossy JPEG copies of the shared folder, and the dense network is trained on them first, as in
`qat_cifar.py`. Every row then ends with the same epochs of W2A2 training (PACT, SAWB) of a network within the MACs and
the parameters of the original one. A search also trains weights, on half of its images: so a row of the unexpanded
network trains for as many steps more. TAS is the same search with a threshold of 1, which adds no candidates. Two rows
train from random weights, as the paper does: the unexpanded network, and one of the widths that NCE found with the same
seed. The others start from trained weights, which the channels that a search adds do not have. Stem, classifier and the
1x1 convolutions of shortcuts stay in float. Accuracy is that of the packed network on the test images; times are of the
packed networks on CPU with one thread, in turns, after all rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from cifar_resnet import PROCESSOR, write_model
from common import previous_rows, table
from qat_cifar import accuracy, images, train_dense
from qat_runs import Grid, Row, add_options, apply_step, flags, mean_and_seeds, train_cells, work_folder
from torch import Tensor, nn
from train_runs import cifar10

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.measure.cost import Workload, block_macs, block_parameters, count_bytes
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.surgery import keep_units, widen_channels

DENSE, PLAIN, LONGER, TAS, NCE = "dense", "unexpanded", "unexpanded, trained longer", "TAS (only narrower)", "NCE"
PLAIN_RANDOM, NCE_RANDOM = "unexpanded, from random weights", "NCE, from random weights"
ROWS = (PLAIN, LONGER, TAS, NCE, PLAIN_RANDOM, NCE_RANDOM)
WIDTH_LR, SEARCH_LR = 0.02, 0.05
TIMED_BATCHES, REPEATS = (1, 32), 9
QUANTIZERS = {
    "weights": {"quantizer": "sawb"}, "inputs": {"quantizer": "pact", "alpha": 3.0}, "exclude": ["shortcut"],
}  # fmt: skip


def main() -> None:
    options = read_options()
    if options.cells is not None:
        train_cells(options.cells, lambda cell: train_row(cell, options))
        return
    with work_folder(options):
        cifar10(options.folder)
        sizes = ("epochs", "images", "search_epochs", "search_images")
        grid = Grid(__file__, options, flags(options, *sizes, "smoke", "compile"), key, text)
        if not (options.folder / DENSE).exists():  # a resumed run may have another folder
            grid.prepare([{"row": DENSE, "seed": 0}])
        cells = [{"row": name, "seed": seed} for seed in options.seeds for name in reversed(options.rows)]
        if not options.widths_of:  # found by the rows of this run
            grid.run(grid.missing([cell for cell in cells if cell["row"] != NCE_RANDOM]))
        searches = previous_rows(options.widths_of, True) if options.widths_of else grid.rows
        searched = {row["seed"]: list(row["widths"].values()) for row in searches if row["row"] == NCE}
        default = next(iter(searched.values()), None)
        for cell in cells:
            if cell["row"] == NCE_RANDOM and searched:
                cell["channels"] = searched.get(cell["seed"], default)
        grid.run(grid.missing([cell for cell in cells if cell["row"] != NCE_RANDOM or searched]))
        for row, times in zip(grid.rows, measure_times(grid.rows, options), strict=True):
            row |= times
        grid.write()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "nce", seeds=[0, 1, 2], jobs=12)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--epochs", type=float, default=8, help="of training at 2 bits, and of the dense network")
    parser.add_argument("--images", type=int, default=50_000, help="of the training set")
    parser.add_argument("--search-epochs", type=int, default=12)
    parser.add_argument("--search-images", type=int, default=20_000, help="half for the weights, half for the widths")
    parser.add_argument("--widths-of", metavar="NAME", help="results whose NCE rows give the widths to random weights")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--smoke", action="store_true", help="a few images and one seed; no results to keep")
    parser.add_argument("--compile", action="store_true", help="train by torch.compile, but for the search")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.epochs, options.search_epochs = [0], 1, 2
        options.images = options.search_images = 128
    return options


def key(row: Row) -> tuple[str, int]:
    return row["row"], row["seed"]


def model_folder(cell: Row, options: argparse.Namespace) -> Path:
    name = "".join(letter for letter in cell["row"] if letter.isalnum())
    folder: Path = options.folder / f"{name}-{cell['seed']}"
    return folder


def train_row(cell: Row, options: argparse.Namespace) -> Row:
    batch = images(options.folder, "train", options.device, options.images)
    begun, facts = time.monotonic(), {}
    folder: Path = options.folder / DENSE
    if cell["row"] == DENSE:
        model = load(str(write_model(options.folder / "published")), device=options.device)
        train_dense(model, batch, options)
        model.network.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    else:
        model = load(str(folder), device=options.device)
        epochs = options.epochs
        if cell["row"] in (TAS, NCE):
            facts = search(model, cell, batch, options)
        if cell["row"] in (PLAIN_RANDOM, NCE_RANDOM):
            randomize(model, cell)
        if cell["row"] == LONGER:
            epochs += options.search_epochs * options.search_images / 2 / options.images
        facts |= apply_step(training(epochs, options.compile), model, [batch], cell["seed"])
        model_folder(cell, options).mkdir(exist_ok=True)
        save_artifact(model, model_folder(cell, options))
    work = Workload(image_size=32)
    return {
        **cell, "accuracy": accuracy(model, options, 200 if options.smoke else None),
        "seconds": time.monotonic() - begun,
        "macs": block_macs(model.anatomy, work), "parameters": block_parameters(model.anatomy),
        "bytes": count_bytes(model.network), **facts,
    }  # fmt: skip


def search(model: Model, cell: Row, batch: dict[str, Tensor], options: argparse.Namespace) -> Row:
    step: dict[str, Any] = {
        "method": "nce", "budget": {"macs": 1.0}, "second_budget": {"parameters": 1.0}, **QUANTIZERS,
        "epochs": options.search_epochs, "batch_size": 16 if options.smoke else 256, "width_lr": WIDTH_LR,
        "optimizer": {"name": "sgd", "lr": SEARCH_LR, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        **({"threshold": 1.0} if cell["row"] == TAS else {}),
    }  # fmt: skip
    samples = {name: tensor[: options.search_images] for name, tensor in batch.items()}
    begun = time.monotonic()
    facts = METHODS.build(step).apply(model, MethodContext(batches=[samples], seed=cell["seed"]))
    names = ("widths", "expansions", "macs_kept", "parameters_kept", "macs_kept_curve", "parameters_kept_curve")
    return {"search_seconds": time.monotonic() - begun, **{name: facts[name] for name in names}}


@torch.no_grad()
def randomize(model: Model, cell: Row) -> None:
    """Initialize all weights anew; a cell with `channels` gets a network of these widths."""
    for index, (before, width) in enumerate(cell.get("channels", ())):
        part = model.anatomy.parts[index]
        if width > before:
            widen_channels(part, width)
        elif width < before:
            keep_units(model.network, part, range(width))
    torch.manual_seed(cell["seed"])
    for module in model.network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d | nn.Linear):
            module.reset_parameters()


def training(epochs: float, compiled: bool) -> Row:
    """Return the step of the recipe that all rows end with."""
    optimizer = {"name": "sgd", "lr": 0.04, "momentum": 0.9, "weight_decay": 1e-4}
    return {
        "method": "qat", **QUANTIZERS, "epochs": epochs, "batch_size": 256, "optimizer": optimizer, "augment": True,
        "max_grad_norm": None, "select": "last", "compile": compiled,
    }  # fmt: skip


@torch.inference_mode()
def measure_times(rows: list[Row], options: argparse.Namespace) -> list[Row]:
    """Return the milliseconds per image of each row's packed network, if its folder is there, by batch size."""
    torch.set_num_threads(1)
    folders = [model_folder(row, options) for row in rows]
    networks = {str(folder): load(str(folder)).network for folder in folders if folder.exists()}
    times: dict[str, Row] = {folder: {} for folder in networks}
    for batch in TIMED_BATCHES:
        pixels = torch.randn(batch, 3, 32, 32)
        rounds: dict[str, list[float]] = {folder: [] for folder in networks}
        for repeat in range(2 if options.smoke else REPEATS):
            for folder, network in networks.items():
                begun = time.perf_counter()
                network(pixels)
                if repeat:  # the first one packs and chooses kernels
                    rounds[folder].append(1000 * (time.perf_counter() - begun) / batch)
        for folder, values in rounds.items():
            times[folder][f"ms_batch_{batch}"] = statistics.median(values)
    return [times.get(str(folder), {}) for folder in folders]


def text(rows: list[Row], options: argparse.Namespace) -> str:
    dense = next(row for row in rows if row["row"] == DENSE)
    cells = []
    for name in ROWS:
        same = sorted((row for row in rows if row["row"] == name), key=lambda row: row["seed"])
        if not same:
            continue
        shares = [[row[measure] / dense[measure] for row in same] for measure in ("macs", "parameters")]
        timed = [[row[f"ms_batch_{batch}"] for row in same if f"ms_batch_{batch}" in row] for batch in TIMED_BATCHES]
        cells.append([
            name, *mean_and_seeds([100 * row["accuracy"] for row in same]),
            *(f"{statistics.mean(share):.3f} ({max(share):.3f})" for share in shares),
            f"{statistics.mean(row['bytes'] for row in same) / 1024:.1f}",
            ", ".join(str(row["expansions"]) for row in same if "expansions" in row),
            *(f"{statistics.mean(values):.2f}" if values else "" for values in timed),
        ])  # fmt: skip
    headings = ["network", "accuracy, %", "by seed", "MACs (most)", "parameters (most)", "KiB", "expansions",
                *(f"ms per image, batch {batch}" for batch in TIMED_BATCHES)]  # fmt: skip
    found = [
        [row["row"], str(row["seed"]), ", ".join(f"{old} to {new}" for old, new in row["widths"].values())]
        for row in sorted(rows, key=lambda row: (row["row"], row["seed"])) if "widths" in row
    ]  # fmt: skip
    missing = 1 + len(options.seeds) * len(options.rows) - len(rows)
    searched = (
        f"Search: {options.search_epochs} epochs of {options.search_images:,} images, half for the weights; then"
        if options.widths_of is None
        else f"Widths of NCE: those of `{options.widths_of}.md`;"
    )
    return (
        f"# Channels of ResNet-20 for 2 bits on CIFAR-10 (JPEG copies)\n\nFloat: {100 * dense['accuracy']:.2f} % after "
        f"training on the copies. {searched} {options.epochs:g} epochs of W2A2 training with {options.images:,} images "
        "(PACT, SAWB), batches of 256. MACs and parameters are those of the blocks relative to the original network. "
        "Times: packed, CPU, one thread."
        + (f" {missing} rows are missing." if missing > 0 else "")
        + "\n\n" + table(headings, cells)
        + (f"\n\n## Widths inside the blocks\n\n{table(['network', 'seed', 'channels, before to after'], found)}"
           if found else "")
    )  # fmt: skip


if __name__ == "__main__":
    main()
