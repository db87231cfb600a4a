"""Quantize ResNets for CIFAR-10 and prune their channels: accuracy, bytes and time per image.

    python benchmarks/images.py [--layers 20] [--test-images 10000] [--work-folder FOLDER]

Every row is a run of `smelt.compress` with a folder of images: the artifact is saved, verified in a clean process,
loaded again and evaluated. Calibration images are from the training split, test images from the test split; both are
lossy JPEG copies, on which the published weights lose about ten points. All models are timed alternately in one
process, in the forward that `smelt eval` runs, on one thread; the least CPU time of many calls counts, so that other
work on the machine matters little. With a work folder, an interrupted run continues with the artifacts in it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cifar_resnet import write_images, write_model
from common import table, write

import smelt
from smelt.data import LabeledImages, load_data
from smelt.measure.cost import count_bytes
from smelt.measure.evaluate import evaluate
from smelt.measure.paired import compare
from smelt.models.load import load
from smelt.models.model import Model

W8 = {"bits": 8, "group_size": -1, "symmetric": True}
W4 = {"bits": 4, "group_size": -1}
PRUNE = {"budget": {"parameters": 0.8}}
RECIPES: dict[str, dict[str, Any]] = {
    "int8 weights (rtn)": {"method": "rtn", **W8},
    "W8A8 dynamic (rtn)": {"method": "rtn", **W8, "input_activations": "int8"},
    "W8A8 static (gptq)": {"method": "gptq", **W8, "input_activations": "int8", "static_activations": True},
    "int4 per channel (rtn)": {"method": "rtn", **W4},
    "int4 per channel (gptq)": {"method": "gptq", **W4},
    "int4, 8-bit activations (gptq)": {
        "method": "gptq", **W4, "input_activations": "int8", "static_activations": True,
    },
    "int3 per channel (rtn)": {"method": "rtn", **W4, "bits": 3},
    "int3 per channel (gptq)": {"method": "gptq", **W4, "bits": 3},
    "channels pruned (magnitude)": {"method": "magnitude", **PRUNE, "repair": "none"},
    "channels pruned and refitted (magnitude)": {"method": "magnitude", **PRUNE, "repair": "full"},
    "channels pruned (fisher)": {"method": "fisher", **PRUNE, "repair": "none"},
    "channels pruned and refitted (fisher)": {"method": "fisher", **PRUNE, "repair": "full"},
}  # fmt: skip
CALIBRATION_IMAGES, SEED = 512, 0
BATCHES = (1, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[20])
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--work-folder", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.work_folder or Path(temporary)
        calibration = write_images(folder / "train", "train", CALIBRATION_IMAGES)
        test = load_data(write_images(folder / "test", "test", arguments.test_images))
        assert isinstance(test, LabeledImages)
        for layers in arguments.layers:
            rows += measure(layers, folder, calibration, test)
    write("images", rows, _text(rows))


def measure(layers: int, folder: Path, calibration: Path, test: LabeledImages) -> list[dict[str, Any]]:
    """Return a row for the model and for each recipe."""
    source = write_model(folder / f"resnet{layers}", layers)
    models = {"float32": load(source)}
    for name, step in RECIPES.items():
        recipe = {
            "seed": SEED,
            "data": {"source": str(calibration), "samples": CALIBRATION_IMAGES, "batch_size": 64},
            "steps": [step],
        }
        out = folder / f"resnet{layers}-{len(models)}"
        if not out.exists():
            resume = out.with_name(f"{out.name}.partial").exists()
            smelt.compress(str(source), smelt.Recipe.parse(recipe), out, speed=False, resume=resume)
        models[name] = load(out)
    base = evaluate(models["float32"], test, batch_size=64)
    timings = time_images(models)
    rows = []
    for name, model in models.items():
        quality = base if name == "float32" else evaluate(model, test, batch_size=64)
        difference = compare(quality, base, seed=SEED)
        rows.append(
            {
                "model": f"resnet{layers}", "name": name, "accuracy": quality.value, "items": len(test),
                "difference": difference.difference, "interval": difference.interval,
                "bytes": count_bytes(model.network), "seed": SEED,
                "ms_per_image": timings[name],
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


@torch.inference_mode()
def time_images(models: dict[str, Model], repeats: int = 40) -> dict[str, dict[str, float]]:
    """Return the least CPU milliseconds per image of each model by batch size, timed alternately on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result: dict[str, dict[str, float]] = {name: {} for name in models}
    for batch in BATCHES:
        x = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(SEED))
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(repeats):
            for name, model in models.items():
                start = time.process_time()
                model.network(pixel_values=x)
                times[name].append(time.process_time() - start)
        for name, values in times.items():
            result[name][str(batch)] = 1e3 * min(values) / batch
    torch.set_num_threads(threads)
    return result


def _text(rows: list[dict[str, Any]]) -> str:
    cells = []
    base: dict[str, Any] = {}
    for row in rows:
        base = row if row["name"] == "float32" else base
        low, high = row["interval"]
        change = "" if row is base else f"{100 * row['difference']:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
        times = [
            f"{row['ms_per_image'][str(batch)]:.2f} "
            f"({base['ms_per_image'][str(batch)] / row['ms_per_image'][str(batch)]:.2f}x)"
            for batch in BATCHES
        ]
        size = f"{row['bytes'] / 1e3:.0f} kB ({row['bytes'] / base['bytes']:.3f})"
        cells.append([row["model"], row["name"], f"{100 * row['accuracy']:.2f} %", change, size, *times])
    headings = ["model", "compression", "accuracy", "change in points, 95 %", "weight bytes"]
    return (
        "# Quantized and pruned ResNets on CIFAR-10\n\n"
        f"Accuracy on {rows[0]['items']:,} test images (lossy JPEG copies). Calibration: {CALIBRATION_IMAGES} training "
        f"images, seed {SEED}. Times are CPU milliseconds per image of one forward on one thread (and the speed "
        "relative to float32), the least of 40 calls, all models alternately; with float activations, quantized "
        "weights are dequantized in every forward. Pruning keeps 0.8 of the parameters of the blocks; refitted is "
        "`repair: full` with its default damping.\n\n"
    ) + table([*headings, *(f"batch {batch}" for batch in BATCHES)], cells)


if __name__ == "__main__":
    main()
