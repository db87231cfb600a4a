"""C99 export of an integer-only MiniLM slice: memory per layer, code size, warnings, sanitizers, float instructions.

The slice is MiniLM fine-tuned on SST-2 with its first two blocks, calibrated on SST-2 sentences, by I-BERT's forms and
with the tables of NN-LUT.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import minilm_sst2, shared, table, write

from smelt.compression.calibration.ranges import observe_ranges
from smelt.data import load_labeled
from smelt.export.c_source import write_files, write_source
from smelt.export.integer import graph_inputs
from smelt.models.model import Model
from smelt.runtime.integer.builder import GraphBuilder
from smelt.runtime.integer.encoders import convert_encoder, observed_modules
from smelt.runtime.integer.network import IntegerNetwork
from smelt.runtime.integer.run import Interpreter
from smelt.runtime.integer.table_builder import TableBuilder

LENGTH = 64
BLOCKS = 2
INPUTS = 200
SANITIZE = ["-O1", "-fno-sanitize-recover=all", "-fsanitize=address,undefined"]
STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
FLOAT_REGISTERS = re.compile(r"\b[vqdshb]\d{1,2}\b|%[xyz]?mm\d|%st\b")
EMULATORS = {"x86_64-linux-gnu-gcc": "qemu-x86_64-static", "aarch64-linux-gnu-gcc": "qemu-aarch64-static"}


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
            for compiler in ("gcc", "clang", "x86_64-linux-gnu-gcc") if nonlinear == "i-bert" else ("gcc",):
                if shutil.which(compiler):
                    rows.append({"nonlinear": nonlinear, "compiler": compiler, **check(Path(folder), compiler)})
                    print(rows[-1], flush=True)
            for options, count in ((["-O2"], arguments.inputs), (SANITIZE, min(arguments.inputs, 5))):
                equal = equal_outputs(model, Path(folder), options, count)
                rows.append({"nonlinear": nonlinear, "options": options[-1], "inputs": count, "equal": equal})
                print(rows[-1], flush=True)
    write("c_export", [*rows, {"memory": memory}], text(rows, memory))


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
        if file.name == "test.c":
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
    emulator = EMULATORS.get(compiler)
    command = [program] if emulator is None else [emulator, program]
    if emulator is not None and shutil.which(emulator) is None:
        return {"code_bytes": code, "float_instructions": floats, "compile_seconds": seconds, "result": "not run"}
    result = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {"code_bytes": code, "float_instructions": floats, "compile_seconds": seconds, "result": result}


def equal_outputs(model: Model, folder: Path, options: list[str], count: int) -> int:
    """Return for how many texts the compiled program has all outputs of the reference."""
    graph = model.network.graph
    names = list(graph.inputs)
    outputs = Interpreter(graph).run(graph_inputs(model, graph, 1, LENGTH))
    sizes = {name: outputs[name].numel() for name in graph.outputs}
    buffers = "".join(f"static int32_t {name.replace('.', '_')}[{size}];\n" for name, size in sizes.items())
    inputs = "".join(f"static int32_t {name}[{LENGTH}];\n" for name in names)
    reads = " && ".join(f"fread({name}, 4, {LENGTH}, stdin) == {LENGTH}" for name in names)
    writes = "".join(f"        fwrite({name.replace('.', '_')}, 4, {size}, stdout);\n" for name, size in sizes.items())
    call = ", ".join((*names, *(name.replace(".", "_") for name in sizes)))
    (folder / "stream.c").write_text(
        f'#include <stdio.h>\n#include "model.h"\n{inputs}{buffers}int main(void)\n{{\n    while ({reads}) {{\n'
        f"        if (model_run({call})) {{\n            return 1;\n        }}\n{writes}    }}\n    return 0;\n}}\n"
    )
    sources = [str(file) for file in sorted(folder.glob("*.c")) if file.name != "test.c"]
    program = str(folder / "stream")
    objects = [str(file) for file in sorted(folder.glob("constants_[0-9]-gcc.o"))]  # compiled before
    sources = [file for file in sources if "constants" not in file]
    subprocess.run(["gcc", *STRICT, *options, *sources, *objects, "-o", program], check=True)
    tensors = [
        {name: values.to(torch.int32) for name, values in encode(model, [sentence]).items() if name in names}
        for sentence in texts()[100 : 100 + count]
    ]
    stream = b"".join(each[name].numpy().tobytes() for each in tensors for name in names)
    raw = subprocess.run([program], input=stream, capture_output=True, check=True).stdout
    results = torch.frombuffer(bytearray(raw), dtype=torch.int32).view(count, -1)
    expected = [Interpreter(graph).run(each) for each in tensors]
    flat = torch.stack(
        [torch.cat([each[name].flatten().to(torch.int32) for name in graph.outputs]) for each in expected]
    )
    return int((results == flat).all(dim=1).sum())


def text(rows: list[dict[str, Any]], memory: dict[str, Any]) -> str:
    compiled = table(
        ["nonlinear", "compiler", "code, bytes", "float instructions", "seconds to compile", "test vector"],
        [[r["nonlinear"], r["compiler"], str(r["code_bytes"]), str(r["float_instructions"]),
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
    equal = "; ".join(f"{r['nonlinear']} ({r['options']}): {r['equal']} of {r['inputs']}" for r in rows if "equal" in r)
    return f"""# C99 export: two blocks of MiniLM

`python benchmarks/c_export.py`

MiniLM fine-tuned on SST-2, its first {BLOCKS} blocks and head, {LENGTH} tokens. All files compile with
`-std=c99 -pedantic -Wall -Wextra -Werror -O2 -mgeneral-regs-only`. {totals}.

{compiled}

SST-2 sentences for which the program has all integers of the reference: {equal}.

Memory per layer (i-bert):

{layers}"""


if __name__ == "__main__":
    main()
