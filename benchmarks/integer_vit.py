"""Integer-only ViT on MNIST: I-BERT's, I-ViT's and NN-LUT's nonlinear functions, each of them put back in float.

    PYTHONPATH=src:benchmarks python benchmarks/integer_vit.py --cache FOLDER [--images 2000] [--seeds 0 1 2]
    PYTHONPATH=src:benchmarks python benchmarks/integer_vit.py --cache FOLDER --train-only

There are no weights of a ViT here, so a small one is trained first, for a minute on a CPU, and kept in the cache
folder. Its task is easy, and only the difference to itself in integers is of interest. A seed draws the calibration
images. Every row is compared with the float network image by image; the rows of the ablation compute one nonlinear
function in float64 and round its result to the graph's integers, with the first seed and fewer images.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import shared, table, write
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.measure.eval_result import EvalResult
from smelt.measure.paired import compare
from smelt.models.model import Model
from smelt.runtime.integer.debug import float_interpreter

FORMS = ("i-bert", "shift", "nn-lut")
FUNCTIONS = ("gelu", "softmax", "layer_norm")
STEPS, BATCH_SIZE, LEARNING_RATE, WARMUP = 600, 64, 1e-3, 50
CALIBRATION = 128
TRAINING_IMAGES = 60_000
Row = dict[str, Any]


def images(split: str) -> tuple[Tensor, Tensor]:
    """Return pixels from -1 to 1 [images, 1, 28, 28] and labels."""
    with np.load(shared() / "data" / "mnist" / "mnist.npz") as archive:
        pixels, labels = archive[f"x_{split}"], archive[f"y_{split}"]
    return torch.from_numpy(pixels)[:, None].float() / 127.5 - 1, torch.from_numpy(labels.astype(np.int64))


def trained_network(cache: Path, steps: int) -> ViTForImageClassification:
    """Return the network of the cache folder, trained first if it is not there."""
    folder = cache / f"vit-mnist-{steps}"
    if not folder.exists():
        train(steps).save_pretrained(folder)
    return ViTForImageClassification.from_pretrained(folder).eval()


def train(steps: int) -> ViTForImageClassification:
    """Train from random weights with AdamW and a cosine schedule; images are moved by a few pixels."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=28, patch_size=7, num_channels=1, hidden_size=128, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=256, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.08,  # with that of large networks, so short a training hardly begins
    )  # fmt: skip
    network = ViTForImageClassification(config).train()
    pixels, labels = images("train")
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    factor = lambda step: min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps)))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    order = torch.cat([torch.randperm(len(labels)) for _ in range(-(-steps * BATCH_SIZE // len(labels)))])
    begun = time.process_time()
    for step in range(steps):
        chosen = order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
        loss = network(pixel_values=moved(pixels[chosen]), labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.process_time() - begun:.0f} s of CPU time", flush=True)
    return network.eval()


def moved(pixels: Tensor) -> Tensor:
    """Move all images of a batch by up to two pixels."""
    top, left = torch.randint(0, 5, (2,)).tolist()
    return torch.nn.functional.pad(pixels, (2, 2, 2, 2), value=-1.0)[..., top : top + 28, left : left + 28]


@torch.no_grad()
def evaluate(network: Any, values: Tensor, labels: Tensor) -> EvalResult:
    logits = torch.cat([network(pixel_values=part).logits for part in values.split(50)])
    correct = (logits.argmax(1) == labels).double().numpy()
    return EvalResult(
        metric="accuracy", value=float(correct.mean()), higher_is_better=True, data="MNIST", items=correct,
        predictions=logits.argmax(1).numpy(), labels=labels.numpy(), logits=logits.numpy(),
    )  # fmt: skip


def converted(network: ViTForImageClassification, form: str, seed: int) -> Any:
    """Return the integer network, calibrated on training images that the seed draws."""
    drawn = np.random.Generator(np.random.PCG64(seed)).choice(TRAINING_IMAGES, CALIBRATION, replace=False)
    pixels = images("train")[0][drawn]
    model = Model(copy.deepcopy(network))
    batches = [{"pixel_values": part} for part in pixels.split(32)]
    METHODS.build({"method": "integer-only", "nonlinear": form}).apply(model, MethodContext(batches=batches, seed=seed))
    return model.network


def measure(network: ViTForImageClassification, options: argparse.Namespace) -> list[Row]:
    values, labels = (each[: options.images] for each in images("test"))
    few = options.ablation_images
    reference, reference_few = (evaluate(network, values[:count], labels[:count]) for count in (options.images, few))
    rows: list[Row] = [{"form": "float", "seed": None, "in_float": "all", "accuracy": reference.value}]

    def add(form: str, seed: int, in_float: str, quality: EvalResult, base: EvalResult) -> None:
        result = compare(quality, base, seed=seed)
        assert quality.logits is not None and base.logits is not None
        noise = float(np.square(quality.logits - base.logits).sum() / np.square(base.logits).sum())
        rows.append({
            "form": form, "seed": seed, "in_float": in_float, "accuracy": quality.value, "images": len(base.items),
            "difference": result.difference, "interval": list(result.interval), "flips": result.flips,
            "sqnr_db": -10 * math.log10(noise),
        })  # fmt: skip
        print(rows[-1], flush=True)
        write("integer_vit", rows, text(rows, options))

    for seed in options.seeds:
        for form in FORMS:
            integer = converted(network, form, seed)
            add(form, seed, "", evaluate(integer, values, labels), reference)
            if seed != options.seeds[0] or form == "nn-lut":  # a table does not say of which function it is
                continue
            for name in (*FUNCTIONS, "all"):
                functions = FUNCTIONS if name == "all" else (name,)
                integer.interpreter = float_interpreter(integer.graph, functions)
                add(form, seed, name, evaluate(integer, values[:few], labels[:few]), reference_few)
    return rows


def text(rows: list[Row], options: argparse.Namespace) -> str:
    cells = []
    for form in FORMS:
        same = [row for row in rows if row["form"] == form and not row["in_float"]]
        if same:
            cells.append([
                form, f"{100 * statistics.mean(row['accuracy'] for row in same):.2f}",
                f"{100 * statistics.mean(row['difference'] for row in same):+.2f}",
                "; ".join(interval(row) for row in same),
                f"{100 * statistics.mean(row['flips'] for row in same):.2f}",
                f"{statistics.mean(row['sqnr_db'] for row in same):.1f}",
            ])  # fmt: skip
    ablation = [
        [row["form"], row["in_float"], interval(row), f"{100 * row['flips']:.2f}", f"{row['sqnr_db']:.1f}"]
        for row in rows if row["in_float"] and row["form"] != "float"
    ]  # fmt: skip
    return (
        f"# Integer-only ViT on MNIST\n\nA small ViT (patches of 7 x 7 pixels, 6 layers of width 128), trained here "
        f"for {options.steps} steps of {BATCH_SIZE} images only: {100 * rows[0]['accuracy']:.2f} % in float on the "
        f"first {options.images:,} test images. {CALIBRATION} images of calibration. Differences "
        "are in points, with the paired 95 % interval of every seed; flips are predictions that changed.\n\n"
        + table(["form", "accuracy, %", "mean difference", "difference by seed", "flips, %", "SQNR of logits, dB"],
                cells)
        + f"\n\nOne function, or all, computed in float; seed {options.seeds[0]}, the first "
        f"{options.ablation_images:,} images:\n\n"
        + table(["form", "in float", "difference", "flips, %", "SQNR of logits, dB"], ablation)
    )  # fmt: skip


def interval(row: Row) -> str:
    low, high = (100 * bound for bound in row["interval"])
    return f"{100 * row['difference']:+.2f} ({low:+.2f} to {high:+.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder of the trained network")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--images", type=int, default=2000, help="of the test set")
    parser.add_argument("--ablation-images", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--train-only", action="store_true")
    options = parser.parse_args()
    network = trained_network(options.cache, options.steps)
    if not options.train_only:
        measure(network, options)


if __name__ == "__main__":
    main()
