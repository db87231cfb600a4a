"""Time of ResNet-20 with low-bit convolutions on CPU, against float32: W2A2, W4A4 and W8A8, as `qat` packs them.

    PYTHONPATH=src:benchmarks python benchmarks/low_bit_conv_speed.py [--batches 1 8 32] [--rounds 15] [--threads 1]

Weights are random (fine for time, never for quality) and all networks take turns in every round. One row is W2A2 with
the weight dequantized and the inputs fake-quantized, as where there is no integer kernel. Every convolution of the
others must have run as integers, or the script fails.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from cifar_resnet import CLASSES, WIDTHS
from common import table, write
from torch import Tensor

from smelt.compression.distillation.fake_quantize import convert, init_activations, prepare
from smelt.compression.distillation.quantizers.minmax import MinMax, MinMaxActivations
from smelt.compression.distillation.quantizers.pact import Pact
from smelt.compression.distillation.quantizers.sawb import Sawb
from smelt.kernels.dispatch import use_backend
from smelt.models.cifar_resnet import CifarResNetConfig, CifarResNetForImageClassification
from smelt.models.quantized import QuantizedConv

FLOAT, DEQUANTIZED = "float32", "W2A2, dequantized"
QUANTIZERS: dict[str, tuple[Any, Any]] = {
    "W2A2 (SAWB, PACT)": (Sawb(2), Pact(2)),
    "W4A4 (SAWB, PACT)": (Sawb(4), Pact(4)),
    "W8A8 (min-max)": (MinMax("int8/tensor"), MinMaxActivations(8, signed=True)),
    DEQUANTIZED: (Sawb(2), Pact(2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    networks = {FLOAT: resnet(), **{name: quantized(*pair) for name, pair in QUANTIZERS.items()}}
    rows = []
    for batch in options.batches:
        times = measure(networks, torch.randn(batch, 3, 32, 32), options.rounds)
        rows += [{"row": name, "batch": batch, "ms": 1000 * seconds / batch} for name, seconds in times.items()]
    for name, network in networks.items():
        backends = {each.backend for each in network.modules() if isinstance(each, QuantizedConv)}
        expected = {FLOAT: set(), DEQUANTIZED: {"cpu-float"}}.get(name, {"cpu-integer"})
        assert backends == expected, f"the convolutions of {name} ran as {backends}"
    write("low_bit_conv_speed", rows, text(rows, options))


def resnet() -> Any:
    torch.manual_seed(0)
    config = CifarResNetConfig(
        embedding_size=WIDTHS[0], hidden_sizes=list(WIDTHS), depths=[3] * 3, layer_type="basic",
        num_labels=len(CLASSES), image_size=32,
    )  # fmt: skip
    return CifarResNetForImageClassification(config).eval()


def quantized(weights: Any, inputs: Any) -> Any:
    """Return the network with packed convolutions in its blocks, shortcuts excepted."""
    network = resnet()
    paths = [
        path for path, module in network.named_modules()
        if isinstance(module, torch.nn.Conv2d) and "encoder" in path and "shortcut" not in path
    ]  # fmt: skip
    prepare(network, dict.fromkeys(paths, weights), inputs)
    init_activations(network, {"pixel_values": torch.randn(8, 3, 32, 32)})
    convert(network)
    return network.eval()


@torch.inference_mode()
def measure(networks: dict[str, Any], x: Tensor, rounds: int) -> dict[str, float]:
    """Return the median seconds of each network."""
    calls: dict[str, Callable[[], object]] = {name: (lambda each=each: each(x)) for name, each in networks.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(rounds + 3):
        for name, call in calls.items():
            with use_backend("cpu-float") if name == DEQUANTIZED else nullcontext():
                begun = time.perf_counter()
                call()
            if repeat >= 3:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values) for name, values in seconds.items()}


def text(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    cells = []
    for name in dict.fromkeys(row["row"] for row in rows):
        values = []
        for batch in options.batches:
            ours, dense = (
                next(row["ms"] for row in rows if (row["row"], row["batch"]) == (each, batch)) for each in (name, FLOAT)
            )
            values.append(f"{ours:.2f} ({dense / ours:.2f}x)")
        cells.append([name, *values])
    return (
        f"# ResNet-20 with low-bit convolutions on CPU\n\nMilliseconds per image, medians of {options.rounds} rounds, "
        f"{options.threads} thread(s); in brackets the speed against float32. First convolution, shortcuts and "
        "classifier stay in float; batch norms are not folded.\n\n"
        + table(["network", *(f"batch {batch}" for batch in options.batches)], cells)
    )


if __name__ == "__main__":
    main()
