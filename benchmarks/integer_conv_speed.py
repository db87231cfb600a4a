"""Speed of integer-only networks of convolutions on CPU: fused kernels, the reference, and float32 in PyTorch.

    python benchmarks/integer_conv_speed.py [--batches 1,8] [--rounds 9]

ResNet-20, a QuartzNet and MobileNetV1-0.25 with random weights (fine for time, never for quality), and batch norms
folded on all sides. Sides take turns in every round.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import table, write
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

from smelt.models.batch_norm import fold_batch_norms
from smelt.models.cifar_resnet import CifarResNetConfig, CifarResNetForImageClassification
from smelt.models.quartznet import QuartzNetConfig, QuartzNetForCTC
from smelt.runtime.integer.convolution_call import ConvolutionCall
from smelt.runtime.integer.convolutions import convert_convolutions
from smelt.runtime.integer.fused import ReferenceCall
from smelt.runtime.integer.graph import DTYPES, IntegerGraph
from smelt.runtime.integer.run import Interpreter, add_default_inputs
from smelt.runtime.integer.traced_network import TracedNetwork

FUSED, REFERENCE, FLOAT32 = "fused integer", "integer reference", "torch float32"
CHEAP = {"mean", "permute", "reshape", "max_pool"}  # operators that need no kernel; the last one of the mask
FRAMES = 500  # of a recording: five seconds
ROUNDS, PAUSE = 9, 0.02  # seconds between two sides, so that no thread of the last one still spins
SECONDS = 0.2  # of one measurement
MOBILENET = ((16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2), *[(128, 1)] * 5, (256, 2), (256, 1))
Call = Callable[[], Any]


class MobileNet(PreTrainedModel):
    """MobileNetV1 of width 0.25 with two classes, as in MLPerf Tiny."""

    config_class = PreTrainedConfig
    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())
        layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU()]
        channels = 8
        for outputs, stride in MOBILENET:
            layers += [nn.Conv2d(channels, channels, 3, stride, 1, groups=channels), nn.ReLU()]
            layers += [nn.Conv2d(channels, outputs, 1), nn.ReLU()]
            channels = outputs
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 2))

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=self.layers(pixel_values))


def networks() -> dict[str, tuple[PreTrainedModel, tuple[int, ...]]]:
    """Return the networks and the shape of one input."""
    torch.manual_seed(0)
    resnet = CifarResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64], depths=[3] * 3, layer_type="basic")
    return {
        "ResNet-20": (CifarResNetForImageClassification(resnet).eval(), (3, 32, 32)),
        "MobileNetV1-0.25": (MobileNet().eval(), (3, 96, 96)),
        "QuartzNet": (QuartzNetForCTC(QuartzNetConfig()).eval(), (64, FRAMES)),
    }


def random_batch(batch: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))


def integer_graph(network: PreTrainedModel, values: Tensor) -> IntegerGraph:
    traced = TracedNetwork(copy.deepcopy(network), {network.main_input_name: values})
    ranges: dict[str, float] = {}
    traced.run(values, lambda name, value: ranges.update({name: value.abs().max().item()}))
    return convert_convolutions(traced, ranges)[0]


def checked_interpreter(graph: IntegerGraph, inputs: dict[str, Tensor]) -> Interpreter:
    """Return an interpreter whose products are kernels, with the bits of the reference."""
    interpreter = Interpreter(graph, "cpu")
    others = {call.node.op for call in interpreter.program.calls if isinstance(call, ReferenceCall)}
    assert others <= CHEAP, others - CHEAP
    convolutions = sum(node.op in ("conv1d", "conv2d") for node in graph.nodes)
    assert sum(isinstance(call, ConvolutionCall) for call in interpreter.program.calls) == convolutions
    expected = Interpreter(graph).run(inputs)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in interpreter.run(inputs).items())
    return interpreter


def sides(network: PreTrainedModel, graph: IntegerGraph, values: Tensor) -> dict[str, Call]:
    """Return what is timed, by name."""
    name = network.main_input_name
    dtype = DTYPES[graph.inputs[name]]
    limits = torch.iinfo(dtype)
    codes = (values / graph.scales[name]).round().clamp(limits.min, limits.max).to(dtype)
    integers = add_default_inputs({name: codes})
    fused, reference = checked_interpreter(graph, integers), Interpreter(graph)

    def run_float() -> None:
        with torch.inference_mode():
            network(**{name: values})

    return {
        FUSED: lambda: fused.run(integers),
        FLOAT32: run_float,
        REFERENCE: lambda: reference.run(integers),
    }


def milliseconds(call: Call) -> float:
    """Return the time of one call, over as many as fill `SECONDS`."""
    count, start = 0, time.perf_counter()
    while not count or time.perf_counter() - start < SECONDS:
        call()
        count += 1
    return 1e3 * (time.perf_counter() - start) / count


def compare(calls: dict[str, Call], rounds: int) -> dict[str, Any]:
    """Return the milliseconds of every side, round by round, and the median of its ratios to the fused kernels."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(PAUSE)
            times[name].append(milliseconds(call))
    ratios = {
        name: statistics.median(other / ours for other, ours in zip(values, times[FUSED], strict=True))
        for name, values in times.items()
    }
    return {
        "milliseconds": {name: statistics.median(values) for name, values in times.items()},
        "speedup": ratios, "rounds": times, "load_average": os.getloadavg()[0],
    }  # fmt: skip


def text(rows: list[dict[str, Any]]) -> str:
    cells = [
        [row["network"], str(row["batch"]),
         *(f"{row['milliseconds'][side]:.3g}" for side in (FUSED, FLOAT32, REFERENCE)),
         f"{row['speedup'][FLOAT32]:.2f}", f"{row['speedup'][REFERENCE]:.1f}", f"{row['load_average']:.1f}"]
        for row in rows
    ]  # fmt: skip
    headings = [
        "network", "batch", f"{FUSED}, ms", f"{FLOAT32}, ms", f"{REFERENCE}, ms", "speed-up over float32",
        "over the reference", "load average",
    ]  # fmt: skip
    return (
        "# Integer-only networks of convolutions (cpu)\n\n`python benchmarks/integer_conv_speed.py`\n\n"
        f"Random weights; images of 32 x 32 and 96 x 96, spectrograms of {FRAMES} frames; {torch.get_num_threads()} "
        "threads. Sides take turns in every round, a time is the median of the rounds, and a speed-up is the median of "
        "their ratios. All convolutions are fused kernels, whose outputs equal those of the reference. The load "
        "average is that of the machine while the row was timed; more than the number of threads means that other "
        "programs took a part of the cores.\n\n" + table(headings, cells)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,8", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--smoke", action="store_true", help="write no results")
    options = parser.parse_args()
    rows = []
    for name, (network, shape) in networks().items():
        graph = integer_graph(network, random_batch(2, shape))
        fold_batch_norms(network, {network.main_input_name: random_batch(2, shape)})
        for batch in (int(size) for size in options.batches.split(",")):
            measured = compare(sides(network, graph, random_batch(batch, shape)), options.rounds)
            rows.append({"network": name, "batch": batch, **measured})
            print({key: value for key, value in rows[-1].items() if key != "rounds"}, flush=True)
    if not options.smoke:
        write("integer_conv_speed", rows, text(rows))


if __name__ == "__main__":
    main()
