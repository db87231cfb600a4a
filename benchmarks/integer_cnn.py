"""Integer-only image networks: ResNet-20 and the MLPerf Tiny networks, by bits and by calibration data.

    python benchmarks/integer_cnn.py [--images 200] [--seeds 0 1 2] [--smoke]

ResNet-20 and ResNet-8 are scored on the first JPEG copies of CIFAR-10's test images. There is no data for DS-CNN,
MobileNet and the autoencoder: random inputs show how near their integer form is to the float network. Needs the
packages `tflite` and `pillow`.
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar_resnet import PROCESSOR, write_model
from common import shared, table, write
from PIL import Image
from tflite_network import FILES, TfliteNetwork
from torch import Tensor

from smelt.compression.calibration.zero_shot import noise_inputs, synthesize_inputs
from smelt.compression.quantization.integer_convolutions import integer_convolutions
from smelt.models.load import load
from smelt.models.model import Model
from smelt.runtime.integer.convolutions import BitWidths

SAMPLES, BATCH_SIZE = 64, 8
BITS = (8, 6, 4)
PERCENTILE = 99.996
RANDOM_INPUTS = 64
Row = dict[str, Any]


def images(split: str, indices: range | np.ndarray) -> tuple[Tensor, Tensor]:
    """Return pixels from 0 to 255 [images, 3, 32, 32] and labels."""
    with np.load(shared() / "data" / "cifar10_jpeg" / f"{split}.npz") as archive:
        blob, offset, labels = archive["blob"], archive["offset"], archive["label"]
    files = [io.BytesIO(blob[offset[i] : offset[i + 1]].tobytes()) for i in indices]
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    chosen = torch.from_numpy(labels[list(indices)].astype(np.int64))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float(), chosen


def normalized(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(PROCESSOR[key]).reshape(3, 1, 1) for key in ("image_mean", "image_std"))
    return (pixels / 255 - mean) / std


@torch.no_grad()
def outputs(network: Any, values: Tensor) -> Tensor:
    return torch.cat([network(pixel_values=part).logits for part in values.split(50)])


def row(name: str, model: Model, batches: Any, values: Tensor, labels: Tensor | None, **facts: Any) -> Row:
    """Convert with these batches, and compare with the float network."""
    network, bits = model.network, facts["bits"]
    integer, _ = integer_convolutions(model, batches, bits=BitWidths(bits, bits), percentile=PERCENTILE)
    expected, actual = outputs(network, values), outputs(integer, values)
    noise = float((expected - actual).double().square().sum())
    result = {
        "network": name, **facts,
        "sqnr_db": 10 * math.log10(float(expected.double().square().sum()) / noise),
        "same_arg_max": float((expected.argmax(1) == actual.argmax(1)).float().mean()),
    }  # fmt: skip
    if labels is not None:
        result["accuracy"] = float((actual.argmax(1) == labels).float().mean())
        result["float_accuracy"] = float((expected.argmax(1) == labels).float().mean())
    print(result, flush=True)
    return result


def cifar_rows(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Score ResNet-20, calibrated on images, without data and on noise, and ResNet-8, calibrated on images."""
    test, labels = images("test", range(options.images))
    resnet20 = load(write_model(folder))
    resnet8 = Model(TfliteNetwork("ResNet-8"))
    rows = []
    for seed in options.seeds:
        drawn = np.random.Generator(np.random.PCG64(seed)).choice(50_000, SAMPLES, replace=False)
        train, _ = images("train", np.sort(drawn))
        shape = (3, 32, 32)
        calibration = {
            "images": [{"pixel_values": normalized(train)}],
            "synthetic": synthesize_inputs(
                resnet20.network, shape, samples=SAMPLES // 4, batch_size=BATCH_SIZE, seed=seed
            ),
            "gaussian": noise_inputs(resnet20.network, shape, "gaussian", samples=SAMPLES, seed=seed),
            "uniform": noise_inputs(resnet20.network, shape, "uniform", samples=SAMPLES, seed=seed),
        }
        for bits in BITS:
            for kind, batches in calibration.items():
                facts = {"bits": bits, "data": kind, "seed": seed}
                rows.append(row("ResNet-20", resnet20, batches, normalized(test), labels, **facts))
            facts = {"bits": bits, "data": "images", "seed": seed}
            rows.append(row("ResNet-8", resnet8, [{"pixel_values": train}], test, labels, **facts))
    return rows


def random_rows() -> list[Row]:
    rows = []
    for name in [name for name in FILES if name != "ResNet-8"]:
        model = Model(TfliteNetwork(name))
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(2 * RANDOM_INPUTS, *model.network.input_shape, generator=generator)
        batches = [{"pixel_values": values[:RANDOM_INPUTS]}]
        facts = {"bits": 8, "data": "random inputs", "seed": 0}
        rows.append(row(name, model, batches, values[RANDOM_INPUTS:], None, **facts))
    return rows


def text(rows: list[Row], options: argparse.Namespace) -> str:
    cells = []
    for key in dict.fromkeys((r["network"], r["bits"], r["data"]) for r in rows):
        same = [r for r in rows if (r["network"], r["bits"], r["data"]) == key]
        name, bits, kind = key
        scored = [100 * r["accuracy"] for r in same if "accuracy" in r]
        spread = f" ± {statistics.stdev(scored):.2f}" if len(scored) > 1 else ""
        cells.append([
            name, f"W{bits}A{bits}", kind,
            f"{100 * same[0]['float_accuracy']:.2f}" if scored else "",
            f"{statistics.mean(scored):.2f}{spread}" if scored else "",
            f"{100 * statistics.mean(r['same_arg_max'] for r in same):.1f}",
            f"{statistics.mean(r['sqnr_db'] for r in same):.1f}",
        ])  # fmt: skip
    headings = ["network", "bits", "calibrated on", "float, %", "integer, %", "same arg max, %", "SQNR of logits, dB"]
    return (
        f"# Integer-only image networks\n\nAccuracy on the first {options.images:,} JPEG copies of CIFAR-10's test "
        f"images, mean and standard deviation over {len(options.seeds)} seeds of calibration data ({SAMPLES} images "
        f"or noise, {SAMPLES // 4} synthetic ones; ranges cover {PERCENTILE} % of the magnitudes). DS-CNN, MobileNet "
        "and the autoencoder are compared with their float networks on random inputs, since there is no data for them "
        "here. Batch norms are folded already in the MLPerf Tiny files, so that only ResNet-20 is calibrated without "
        "data.\n\n"
    ) + table(headings, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--smoke", action="store_true", help="few images and one seed; write no results")
    options = parser.parse_args()
    if options.smoke:
        options.images, options.seeds = 50, [0]
    with tempfile.TemporaryDirectory() as temporary:
        rows = [*random_rows(), *cifar_rows(options, Path(temporary))]
    if options.smoke:
        print(text(rows, options))
    else:
        write("integer_cnn", rows, text(rows, options))


if __name__ == "__main__":
    main()
