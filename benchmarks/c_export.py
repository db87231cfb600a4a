"""C99 export of an integer-only MiniLM slice: memory per layer, code size, warnings, sanitizers, float instructions.

The slice is MiniLM fine-tuned on SST-2 with its first two blocks, calibrated on SST-2 sentences, by I-BERT's forms and
with the tables of NN-LUT. One process reads all inputs, also under sanitizers. Rows of an architecture for which there
is no compiler here are kept from the earlier run.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, minilm_sst2, previous_machine, previous_rows, shared, table, write

from smelt.compression.calibration.ranges import observe_ranges
from smelt.data import load_labeled
from smelt.export.c.source import write_files, write_source
from smelt.export.integer import graph_inputs
from smelt.measure.machine import machine
from smelt.models.model import Model
from smelt.runtime.integer.builder import GraphBuilder
from smelt.runtime.integer.encoders import convert_encoder, observed_modules
from smelt.runtime.integer.graph import DTYPES, IntegerGraph, dtype_name
from smelt.runtime.integer.network import IntegerNetwork
from smelt.runtime.integer.run import Interpreter
from smelt.runtime.integer.table_builder import TableBuilder

LENGTH = 64
BLOCKS = 2
INPUTS = 200
SANITIZE = ["-O1", "-fno-sanitize-recover=all", "-fsanitize=address,undefined"]
STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
FLOAT_REGISTERS = re.compile(r"\b[vqdshb]\d{1,2}\b|%[xyz]?mm\d|%st\b")
CROSS = {"aarch64": "x86_64-linux-gnu-gcc", "x86_64": "aarch64-linux-gnu-gcc"}[platform.machine()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=INPUTS, help="texts that the compiled program classifies")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    memory: dict[str, Any] = {}
    for nonlinear, builder in (("i-bert", GraphBuilder), ("nn-lut", TableBuilder)):
        model = integer_slice(builder)
        with tempfile.TemporaryDirectory() as folder:
            source = write_source(model.network.graph, graph_inputs(model, model.network.graph, 1, LENGTH))
            write_files(source, Path(folder))
            memory[nonlinear] = source.memory()
            for compiler in ("gcc", "clang", CROSS) if nonlinear == "i-bert" else ("gcc",):
                if shutil.which(compiler):
                    facts = {"nonlinear": nonlinear, "compiler": compiler, **where(compiler)}
                    rows.append({**facts, **check(Path(folder), compiler)})
                    print(rows[-1], flush=True)
            batches = [encode(model, [sentence]) for sentence in texts()[100 : 100 + arguments.inputs]]
            for options in (["-O2"], SANITIZE):
                equal = equal_outputs(model.network.graph, Path(folder), options, batches)
                facts = {"nonlinear": nonlinear, "options": options[-1], **where("gcc")}
                rows.append({**facts, "inputs": len(batches), "equal": equal})
                print(rows[-1], flush=True)
    rows += earlier_rows({row["target"] for row in rows})
    write("c_export", [*rows, {"memory": memory}], text(rows, memory))


def where(compiler: str) -> dict[str, str]:
    """Return the architecture that a compiler writes for and the CPU of this machine."""
    target = compiler.split("-")[0] if "-" in compiler else platform.machine()
    return {"target": target, "cpu": machine()["cpu"]}


def earlier_rows(measured: set[str]) -> list[dict[str, Any]]:
    """Return the rows of an earlier run for other architectures than the measured ones."""
    if not (RESULTS / "c_export.json").exists():
        return []
    there = previous_machine("c_export")
    native = "aarch64" if "aarch64" in there["os"] else "x86_64"
    rows = []
    for row in previous_rows("c_export", resume=True):
        target = row.get("compiler", "").rpartition("-linux")[0] or native
        rows.append({"target": target, "cpu": there["cpu"], **row})
    return [row for row in rows if "nonlinear" in row and row["target"] not in measured]


def integer_slice(builder: Any) -> Model:
    model = minilm_sst2()
    network = model.network
    network.bert.encoder.layer = network.bert.encoder.layer[:BLOCKS]
    network.config.num_hidden_layers = BLOCKS
    batches = [encode(model, texts()[start : start + 16]) for start in range(0, 64, 16)]
    graph = convert_encoder(network, observe_ranges(network, observed_modules(network), batches, None), builder)
    return Model(IntegerNetwork(graph, network), model.tokenizer, source="minilm-sst2, two blocks")


def texts() -> list[str]:
    return list(load_labeled(shared() / "data/glue/sst2/dev.jsonl.gz").first)


def encode(model: Model, sentences: list[str]) -> dict[str, torch.Tensor]:
    encoded = model.tokenizer(sentences, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    return dict(encoded)


def check(folder: Path, compiler: str) -> dict[str, Any]:
    """Compile with warnings as errors and with general registers only, and look for float instructions."""
    code, floats, start = 0, 0, time.monotonic()
    objects = []
    for file in sorted(folder.glob("*.c")):
        if file.name in ("test.c", "stream.c"):
            continue
        target = folder / f"{file.stem}-{compiler}.o"
        subprocess.run(
            [compiler, *STRICT, "-O2", "-mgeneral-regs-only", "-c", str(file), "-o", str(target)], check=True
        )
        objects.append(str(target))
        if not file.name.startswith("constants"):
            dump = "objdump" if compiler == "clang" else compiler.replace("gcc", "objdump")
            listing = subprocess.run([dump, "-d", str(target)], check=True, capture_output=True, text=True).stdout
            lines = [line.split("\t", 2)[2] for line in listing.splitlines() if line.count("\t") >= 2]
            floats += sum(bool(FLOAT_REGISTERS.search(re.sub(r"\S+ <.*", "", line))) for line in lines)
            size = subprocess.run(["size", "--format=sysv", str(target)], check=True, capture_output=True, text=True)
            code += sum(int(line.split()[1]) for line in size.stdout.splitlines() if line.startswith(".text"))
    seconds = time.monotonic() - start
    program = str(folder / f"program-{compiler}")
    subprocess.run([compiler, *STRICT, "-O2", "-static", str(folder / "test.c"), *objects, "-o", program], check=True)
    result = subprocess.run([*emulator(compiler), program], capture_output=True, text=True, check=False).stdout.strip()
    return {"code_bytes": code, "float_instructions": floats, "compile_seconds": seconds, "result": result}


def equal_outputs(
    graph: IntegerGraph, folder: Path, options: list[str], batches: list[dict[str, torch.Tensor]], compiler: str = "gcc"
) -> int:
    """Return for how many inputs the program has all outputs of the reference; constants are those of `check`."""
    outputs = Interpreter(graph).run(batches[0])
    tensors = {name: batches[0][name].to(DTYPES[graph.inputs[name]]) for name in graph.inputs}
    tensors |= {name: outputs[name] for name in graph.outputs}  # in the order of the function's arguments
    buffers, reads, writes, names = "", [], "", []
    for name, tensor in tensors.items():
        names.append(re.sub(r"[^A-Za-z0-9]", "_", name))
        buffers += f"static {dtype_name(tensor)}_t {names[-1]}[{tensor.numel()}];\n"
        if name in graph.inputs:
            reads.append(f"fread({names[-1]}, {tensor.element_size()}, {tensor.numel()}, stdin) == {tensor.numel()}")
        else:
            writes += f"        fwrite({names[-1]}, {tensor.element_size()}, {tensor.numel()}, stdout);\n"
    (folder / "stream.c").write_text(
        f'#include <stdio.h>\n#include "model.h"\n{buffers}int main(void)\n{{\n    while ({" && ".join(reads)}) {{\n'
        f"        if (model_run({', '.join(names)})) {{\n            return 1;\n        }}\n{writes}    }}\n"
        "    return 0;\n}\n"
    )
    objects = [str(file) for file in sorted(folder.glob(f"constants_[0-9]-{compiler}.o"))]
    sources = [str(folder / name) for name in ("stream.c", "model.c", "kernels.c")]
    program = str(folder / "stream")
    subprocess.run([compiler, *STRICT, *options, *sources, *objects, "-o", program], check=True)
    stream = b"".join(
        each[name].to(DTYPES[dtype]).contiguous().numpy().tobytes()
        for each in batches
        for name, dtype in graph.inputs.items()
    )
    raw = subprocess.run([*emulator(compiler), program], input=stream, capture_output=True, check=True).stdout
    size = len(raw) // len(batches)
    equal = 0
    for index, each in enumerate(batches):
        expected = Interpreter(graph).run(each)
        reference = b"".join(expected[name].contiguous().numpy().tobytes() for name in graph.outputs)
        equal += raw[index * size : (index + 1) * size] == reference
    return equal


def emulator(compiler: str) -> list[str]:
    """Return the command that runs programs of a compiler."""
    machine = compiler.split("-")[0]
    if "-" not in compiler or machine == platform.machine():
        return []
    paths = [shutil.which(name) for name in (f"qemu-{machine}-static", f"qemu-{machine}")]
    return [next(path for path in paths if path is not None)]


def text(rows: list[dict[str, Any]], memory: dict[str, Any]) -> str:
    compiled = table(
        ["nonlinear", "compiler", "target", "CPU", "code, bytes", "float instructions", "seconds to compile",
         "test vector"],
        [[r["nonlinear"], r["compiler"], r["target"], r["cpu"], str(r["code_bytes"]), str(r["float_instructions"]),
          f"{r['compile_seconds']:.0f}", r["result"]] for r in rows if "compiler" in r],
    )  # fmt: skip
    layers = table(
        ["layer", "constants, bytes", "live activations, bytes"],
        [[each["layer"], str(each["constants"]), str(each["activations"])] for each in memory["i-bert"]["layers"]],
    )
    totals = "; ".join(
        f"{name}: constants {each['constant_bytes']} bytes, arena {each['arena_bytes']} bytes"
        for name, each in memory.items()
    )
    equal = table(
        ["nonlinear", "options", "target", "CPU", "equal to the reference"],
        [[r["nonlinear"], r["options"], r["target"], r["cpu"], f"{r['equal']} of {r['inputs']}"]
         for r in rows if "equal" in r],
    )  # fmt: skip
    return f"""# C99 export: two blocks of MiniLM

`python benchmarks/c_export.py`

MiniLM fine-tuned on SST-2, its first {BLOCKS} blocks and head, {LENGTH} tokens. All files compile with
`-std=c99 -pedantic -Wall -Wextra -Werror -O2 -mgeneral-regs-only`. {totals}. Rows of another CPU than
that of the last line are from an earlier run.

{compiled}

SST-2 sentences for which the program has all integers of the reference, all of them in one process:

{equal}

Memory per layer (i-bert):

{layers}"""


if __name__ == "__main__":
    main()
