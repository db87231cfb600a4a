"""C99 export of the MLPerf Tiny networks of convolutions: accuracy, memory per layer, code size, and equal bits.

    python benchmarks/c_export_cnn.py [--inputs 200]

One process reads all inputs, also under sanitizers. Without a cross compiler the rows of the other CPU are kept from
the earlier run.

ResNet-8 reads CIFAR-10 images; there is no data for DS-CNN and MobileNetV1-0.25, which read random inputs. The checks
are those of `c_export.py`. Needs the packages `tflite` and `pillow`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from c_export import CROSS, SANITIZE, check, equal_outputs
from common import previous_rows, table, write
from integer_cnn import PERCENTILE, SAMPLES, images
from tflite_network import TfliteNetwork
from torch import Tensor

from smelt.compression.quantization.integer_convolutions import integer_convolutions
from smelt.export.c.source import write_files, write_source
from smelt.models.model import Model
from smelt.runtime.integer.graph import DTYPES, IntegerGraph

NETWORKS = ("ResNet-8", "DS-CNN", "MobileNetV1-0.25")
EMULATED = 20  # inputs in the emulator of another CPU


def inputs(name: str, shape: tuple[int, ...], count: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return inputs for calibration, inputs for the comparison, and labels of the latter."""
    if name == "ResNet-8":
        train, _ = images("train", range(SAMPLES))
        test, labels = images("test", range(count))
        return train, test, labels
    values = torch.randn(SAMPLES + count, *shape, generator=torch.Generator().manual_seed(0))
    return values[:SAMPLES], values[SAMPLES:], None


def quantized(graph: IntegerGraph, values: Tensor) -> list[dict[str, Tensor]]:
    [(name, dtype)] = graph.inputs.items()
    limits = torch.iinfo(DTYPES[dtype])
    codes = (values / graph.scales[name]).round().clamp(limits.min, limits.max).to(DTYPES[dtype])
    return [{name: code} for code in codes.split(1)]


@torch.no_grad()
def measure(name: str, count: int) -> dict[str, Any]:
    model = Model(TfliteNetwork(name))
    train, test, labels = inputs(name, model.network.input_shape, count)
    integer, _ = integer_convolutions(model, [{"pixel_values": train}], percentile=PERCENTILE)
    expected, actual = (network(pixel_values=test).logits.argmax(1) for network in (model.network, integer))
    row: dict[str, Any] = {"network": name, "inputs": count, "same_arg_max": float((expected == actual).float().mean())}
    if labels is not None:
        row["float_accuracy"] = float((expected == labels).float().mean())
        row["accuracy"] = float((actual == labels).float().mean())
    batches = quantized(integer.graph, test)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = write_source(integer.graph, batches[0])
        write_files(source, folder)
        row["memory"] = source.memory()
        row["compilers"] = {}
        for compiler in ("gcc", "clang", CROSS):
            if shutil.which(compiler):
                result: dict[str, Any] = check(folder, compiler)
                compared = batches[:EMULATED] if compiler == CROSS else batches
                result["inputs"] = len(compared)
                result["equal"] = equal_outputs(
                    integer.graph, folder, ["-O2", "-mgeneral-regs-only", *(["-static"] if compiler == CROSS else [])],
                    compared, compiler,
                )  # fmt: skip
                row["compilers"][compiler] = result
        row["sanitized"] = equal_outputs(integer.graph, folder, SANITIZE, batches)
        row["sanitized_inputs"] = len(batches)
        if not shutil.which(CROSS) and CROSS in (earlier := earlier_compilers(name)):
            row["compilers"][CROSS] = {**earlier[CROSS], "earlier": True}
    print({key: value for key, value in row.items() if key != "memory"}, flush=True)
    return row


def earlier_compilers(name: str) -> dict[str, Any]:
    """Return what an earlier run measured of a network, by compiler."""
    rows = previous_rows("c_export_cnn", resume=True)
    return next((row["compilers"] for row in rows if row["network"] == name), {})


def text(rows: list[dict[str, Any]]) -> str:
    networks = table(
        ["network", "constants, bytes", "arena, bytes", "float, %", "integer, %", "same arg max, %",
         "equal under address and undefined sanitizers"],
        [[row["network"], str(row["memory"]["constant_bytes"]), str(row["memory"]["arena_bytes"]),
          *(f"{100 * row[key]:.1f}" if key in row else "" for key in ("float_accuracy", "accuracy", "same_arg_max")),
          f"{row['sanitized']} of {row['sanitized_inputs']}"] for row in rows],
    )  # fmt: skip
    compiled = table(
        ["network", "compiler", "code, bytes", "float instructions", "seconds to compile", "test vector",
         "equal to the reference", "run"],
        [[row["network"], compiler, str(each["code_bytes"]), str(each["float_instructions"]),
          f"{each['compile_seconds']:.1f}", each["result"], f"{each['equal']} of {each['inputs']}",
          "earlier" if each.get("earlier") else "this"]
         for row in rows for compiler, each in row["compilers"].items()],
    )  # fmt: skip
    layers = "\n\n".join(
        f"{row['network']}, memory per layer:\n\n"
        + table(
            ["layer", "constants, bytes", "live activations, bytes"],
            [[each["layer"], str(each["constants"]), str(each["activations"])] for each in row["memory"]["layers"]],
        )
        for row in rows
    )
    return (
        "# C99 export: networks of MLPerf Tiny\n\n`python benchmarks/c_export_cnn.py`\n\n"
        f"8-bit weights and activations, calibrated on {SAMPLES} inputs. ResNet-8 reads JPEG copies of CIFAR-10's test "
        "images; there is no data here for the others, which read random inputs. All files compile with "
        "`-std=c99 -pedantic -Wall -Wextra -Werror -O2 -mgeneral-regs-only`; programs for another CPU run in QEMU.\n\n"
        f"{networks}\n\n{compiled}\n\n{layers}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=200, help="inputs that the compiled programs classify")
    parser.add_argument("--smoke", action="store_true", help="few inputs; write no results")
    options = parser.parse_args()
    rows = [measure(name, 10 if options.smoke else options.inputs) for name in NETWORKS]
    if options.smoke:
        print(text(rows))
    else:
        write("c_export_cnn", rows, text(rows))


if __name__ == "__main__":
    main()
