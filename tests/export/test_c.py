"""C export: the bits of the reference for every operator, strict compilers, sanitizers, and no float instruction."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from smelt.errors import FormatError
from smelt.export.c.operators import call_lines
from smelt.export.c.source import write_files, write_source
from smelt.export.c.writer import SourceWriter
from smelt.runtime.integer.graph import IntegerGraph, Node
from tests.export.integer_graphs import all_operators

STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
CROSS = {"aarch64": "x86_64-linux-gnu-gcc", "x86_64": "aarch64-linux-gnu-gcc"}
# Registers of floats and vectors: v0, q0, d0, s0, h0, b0 on aarch64; xmm, ymm, zmm, mm and the x87 stack on x86-64.
FLOAT_REGISTERS = re.compile(r"\b[vqdshb]\d{1,2}\b|%[xyz]?mm\d|%st\b")

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def compile_and_run(folder: Path, compiler: str = "gcc", *options: str) -> str:
    sources = sorted(str(file) for file in folder.glob("*.c"))
    program = folder / "program"
    subprocess.run([compiler, *STRICT, *options, *sources, "-o", str(program)], check=True, capture_output=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    return result.stdout + result.stderr


@needs_gcc
def test_every_operator_has_the_bits_of_the_reference(tmp_path: Path) -> None:
    """Under sanitizers: an overflow, a bad shift or a read beyond an array ends the program."""
    write_files(write_source(*all_operators()), tmp_path)
    assert compile_and_run(tmp_path, "gcc", *SANITIZE) == "0 different\n"


@needs_gcc
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_optimized_program_has_the_same_bits(compiler: str, tmp_path: Path) -> None:
    """Activations of several types share memory; an access that broke the aliasing rules would show at -O2."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    write_files(write_source(*all_operators(seed=1)), tmp_path)
    assert compile_and_run(tmp_path, compiler, "-O2") == "0 different\n"


@needs_gcc
def test_test_program_notices_another_result(tmp_path: Path) -> None:
    source = write_source(*all_operators())
    source.files["kernels.c"] = source.files["kernels.c"].replace("quotient - 1", "quotient")
    write_files(source, tmp_path)
    assert not compile_and_run(tmp_path).startswith("0 ")


def compilers() -> list[str]:
    return [name for name in ("gcc", CROSS.get(platform.machine(), "")) if name and shutil.which(name)]


@pytest.mark.parametrize("compiler", compilers())
def test_no_floating_point_instruction(compiler: str, tmp_path: Path) -> None:
    write_files(write_source(*all_operators()), tmp_path)
    code = ""
    for file in sorted(tmp_path.glob("*.c")):
        if file.name != "test.c":
            target = file.with_suffix(".o")
            options = [*STRICT, "-O2", "-mgeneral-regs-only", "-c", str(file), "-o", str(target)]
            subprocess.run([compiler, *options], check=True, capture_output=True)
            objdump = compiler.replace("gcc", "objdump")
            code += subprocess.run([objdump, "-d", str(target)], check=True, capture_output=True, text=True).stdout
    instructions = [line.split("\t", 2)[2] for line in code.splitlines() if line.count("\t") >= 2]
    instructions = [re.sub(r"\S+ <.*", "", line) for line in instructions]  # an address may look like a register
    assert len(instructions) > 500
    assert [line for line in instructions if FLOAT_REGISTERS.search(line)] == []


@needs_gcc
def test_disassembly_check_notices_a_float(tmp_path: Path) -> None:
    file = tmp_path / "float.c"
    file.write_text("float twice(float x) { return x + x; }\n")
    subprocess.run(["gcc", "-O2", "-c", str(file), "-o", str(tmp_path / "float.o")], check=True)
    code = subprocess.run(["objdump", "-d", str(tmp_path / "float.o")], check=True, capture_output=True, text=True)
    assert FLOAT_REGISTERS.search(code.stdout.split("<twice>:")[1])


def chain(length: int) -> tuple[IntegerGraph, dict[str, torch.Tensor]]:
    """Return a chain of permutations of 1000 bytes each."""
    names = ["x", *(f"t{index}" for index in range(length))]
    nodes = [Node("permute", (a,), b, "int8", {"axes": [1, 0]}, {}, b) for a, b in pairwise(names)]
    return IntegerGraph({"x": "int8"}, nodes, [names[-1]]), {"x": torch.zeros(10, 100, dtype=torch.int8)}


def test_memory_is_reused_when_a_tensor_is_dead() -> None:
    graph, inputs = chain(20)
    source = write_source(graph, inputs)
    assert source.arena_bytes == 2000
    assert [layer.activations for layer in source.layers] == [2000] * 20
    assert "MODEL_ARENA_BYTES 2000" in source.files["model.h"]


def test_equal_constants_are_stored_once() -> None:
    weight = torch.ones(4, 4, dtype=torch.int8)
    nodes = [Node("linear", ("x",), name, "int32", {}, {"weight": weight.clone()}, name) for name in ("a", "b")]
    source = write_source(IntegerGraph({"x": "int8"}, nodes, ["a", "b"]), {"x": torch.ones(1, 4, dtype=torch.int8)})
    assert source.constant_bytes == 16
    assert [(layer.layer, layer.constants) for layer in source.layers] == [("a", 16), ("b", 16)]


@needs_gcc
def test_names_of_an_untrusted_graph_are_no_code(tmp_path: Path) -> None:
    graph = IntegerGraph({"x */ int y[": "int8"}, [], ["out\n#error"])
    graph.nodes.append(Node("permute", ("x */ int y[",), "out\n#error", "int8", {"axes": [0]}, {}, '*/\n#include "z"'))
    write_files(write_source(graph, {"x */ int y[": torch.ones(3, dtype=torch.int8)}), tmp_path)
    assert compile_and_run(tmp_path) == "0 different\n"


@needs_gcc
def test_an_index_out_of_range_is_refused_at_run_time(tmp_path: Path) -> None:
    node = Node("embedding", ("ids",), "y", "int8", {}, {"table": torch.ones(3, 2, dtype=torch.int8)}, "embedding")
    source = write_source(IntegerGraph({"ids": "int32"}, [node], ["y"]), {"ids": torch.tensor([2], dtype=torch.int32)})
    source.files["test.c"] = (
        source.files["test.c"].replace("    2\n", "    3\n").replace("return 2;", 'return puts("refused");')
    )
    write_files(source, tmp_path)
    assert compile_and_run(tmp_path, "gcc", *SANITIZE) == "refused\n"


def test_an_operator_without_a_function_is_named() -> None:
    graph, inputs = chain(1)
    unknown = Node("unknown", ("x",), "y", "int8", {}, {}, "encoder.7")
    with pytest.raises(FormatError, match=r"'unknown' of layer 'encoder\.7'"):
        list(call_lines(SourceWriter(graph, inputs, {}), unknown))
