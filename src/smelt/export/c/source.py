"""Write an integer graph as C99: constants, one static arena for activations, no heap, no floating point, no library.

`model.h` declares one function with the shapes, memory and scales; `model.c` calls the operators of `kernels.c`;
`constants_N.c` has the weights and tables; `test.c` runs one input and compares the result with the reference.

Operators and calls are separate translation units on purpose. The arena is a union that tensors of several types
share, by pointers to its members; in one unit with the operators, GCC 12 was seen to drop one of the calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from smelt.export.c.arena import Arena
from smelt.export.c.constants import array_values
from smelt.export.c.helpers import STRUCTURES, used_helpers
from smelt.export.c.operators import KERNELS, call_lines
from smelt.export.c.writer import MEMBERS, RANK, SourceWriter, comment_text, item_bytes
from smelt.runtime.integer.graph import DTYPES, IntegerGraph, dtype_name


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of a layer's constants, and the most bytes of activations that are live while it runs."""

    layer: str
    constants: int
    activations: int


@dataclass(frozen=True)
class CSource:
    """The files of an export by name, and the memory they need."""

    files: dict[str, str]
    arena_bytes: int
    constant_bytes: int
    layers: list[LayerMemory]

    def memory(self) -> dict[str, Any]:
        """Return the memory in plain values."""
        layers = [asdict(layer) for layer in self.layers]
        return {"constant_bytes": self.constant_bytes, "arena_bytes": self.arena_bytes, "layers": layers}


def write_source(graph: IntegerGraph, inputs: Mapping[str, Tensor]) -> CSource:
    """Return the C source of a graph for inputs of the shapes of `inputs`, which are also the test vector."""
    writer = SourceWriter(graph, inputs, KERNELS)
    body = "\n".join(line for node in graph.nodes for line in call_lines(writer, node))
    arena = writer.arena
    layers = _layer_memory(graph, arena)
    constants = writer.constants.files()
    constant_bytes = sum(tensor.nbytes for tensor in writer.constants.tensors.values())
    files = {
        "model.h": _header(writer, arena, layers, constant_bytes),
        "model.c": _program(writer, body, arena),
        "kernels.h": _kernels_header(writer),
        "kernels.c": _kernels(writer),
        **constants,
        "test.c": _test(writer, inputs),
    }
    return CSource(files, arena.size, constant_bytes, layers)


def write_files(source: CSource, folder: Path) -> None:
    """Write the files of an export into a folder."""
    for name, text in source.files.items():
        (folder / name).write_text(text)


def _layer_memory(graph: IntegerGraph, arena: Arena) -> list[LayerMemory]:
    constants: dict[str, int] = {}
    live: dict[str, int] = {}
    for node, size in zip(graph.nodes, arena.live, strict=True):
        constants[node.layer] = constants.get(node.layer, 0) + sum(tensor.nbytes for tensor in node.constants.values())
        live[node.layer] = max(live.get(node.layer, 0), size)
    return [LayerMemory(layer, constants[layer], live[layer]) for layer in constants]


def _signature(writer: SourceWriter) -> str:
    inputs = [f"const {writer.dtypes[name]}_t *in_{writer.identifiers[name]}" for name in writer.graph.inputs]
    outputs = [f"{writer.dtypes[name]}_t *out_{writer.identifiers[name]}" for name in writer.graph.outputs]
    return f"int model_run({', '.join((*inputs, *outputs))})"


def _header(writer: SourceWriter, arena: Arena, layers: list[LayerMemory], constant_bytes: int) -> str:
    graph = writer.graph
    tensors = "".join(
        f" *   {kind}_{writer.identifiers[name]}: {writer.dtypes[name]} {list(writer.shapes[name])}"
        f"{_scale_text(graph, name)}\n"
        for kind, names in (("in", graph.inputs), ("out", graph.outputs))
        for name in names
    )
    width = max([len(each.layer) for each in layers], default=0)
    table = "".join(
        f" *   {comment_text(each.layer):<{width}}  {each.constants:>12}  {each.activations:>12}\n" for each in layers
    )
    return f"""\
/* An integer-only network in C99: no heap, no floating point.
 *
{tensors} *
 * Bytes of constants (read only) and of live activations per layer; equal constants are stored once:
 *   {"layer":<{width}}  {"constants":>12}  {"activations":>12}
{table} *
 * model_run uses one static arena, so it is not reentrant. It returns 0, or 1 if an index of an embedding is out of
 * range.
 */
#ifndef MODEL_H
#define MODEL_H

#include <stdint.h>

#define MODEL_ARENA_BYTES {max(arena.size, 8)}
#define MODEL_CONSTANT_BYTES {constant_bytes}

{_signature(writer)};

#endif
"""


def _scale_text(graph: IntegerGraph, name: str) -> str:
    scale = graph.scales.get(name)
    return f", value = integer * {scale!r}" if isinstance(scale, float) else ""


def _program(writer: SourceWriter, body: str, arena: Arena) -> str:
    size = max(arena.size, 8)
    members = "\n".join(f"    {dtype}_t {member}[{size // item_bytes(dtype)}];" for dtype, member in MEMBERS.items())
    copies_in = _copies(writer, list(writer.graph.inputs), "({place})[i] = in_{name}[i];")
    copies_out = _copies(writer, writer.graph.outputs, "out_{name}[i] = ({place})[i];")
    structures = "\n".join(writer.structures.values())
    return f"""\
#include "model.h"

#include <stddef.h>

#include "constants.h"
#include "kernels.h"

/* Activations, at offsets that were planned by their lifetimes. */
static union {{
{members}
}} arena;

{structures}

{_signature(writer)}
{{
    size_t i;
{copies_in}
{body}
{copies_out}
    return 0;
}}
"""


def _kernels_header(writer: SourceWriter) -> str:
    functions = "\n".join(writer.functions.values())
    prototypes = "\n".join(
        f"{prototype};" for prototype in re.findall(r"^(?:void|int) \w+\([^{]*?\)(?=\n\{)", functions, re.MULTILINE)
    )
    return f"""\
#ifndef MODEL_KERNELS_H
#define MODEL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define RANK {RANK}

{STRUCTURES}
{prototypes}

#endif
"""


def _kernels(writer: SourceWriter) -> str:
    kernels = "\n".join(writer.functions.values())
    return f"""\
#include "kernels.h"

{used_helpers(kernels)}
{kernels}"""


def _copies(writer: SourceWriter, names: list[str], statement: str) -> str:
    return "\n".join(
        f"    for (i = 0; i < {writer.count(name)}; i++) {{\n        "
        + statement.format(place=writer.place(name), name=writer.identifiers[name])
        + "\n    }"
        for name in names
    )


def _test(writer: SourceWriter, inputs: Mapping[str, Tensor]) -> str:
    graph = writer.graph
    vectors = [(f"in_{writer.identifiers[name]}", inputs[name].to(DTYPES[graph.inputs[name]])) for name in graph.inputs]
    vectors += [(f"expected_{writer.identifiers[name]}", writer.results[name]) for name in graph.outputs]
    arrays = "\n".join(
        f"static const {dtype_name(tensor)}_t {name}[{max(tensor.numel(), 1)}] = {{\n{array_values(tensor)}\n}};"
        for name, tensor in vectors
    )
    buffers = "\n".join(
        f"static {writer.dtypes[name]}_t out_{writer.identifiers[name]}[{max(writer.count(name), 1)}];"
        for name in graph.outputs
    )
    arguments = [f"in_{writer.identifiers[name]}" for name in graph.inputs]
    arguments += [f"out_{writer.identifiers[name]}" for name in graph.outputs]
    checks = "\n".join(
        f"    for (i = 0; i < {writer.count(name)}; i++) {{\n"
        f"        different += out_{writer.identifiers[name]}[i] != expected_{writer.identifiers[name]}[i];\n    }}"
        for name in graph.outputs
    )
    return f"""\
/* Run one input and compare with the reference; prints the number of different values. */
#include <stddef.h>
#include <stdio.h>

#include "model.h"

{arrays}
{buffers}

int main(void)
{{
    size_t i;
    unsigned long different = 0;
    if (model_run({", ".join(arguments)})) {{
        return 2;
    }}
{checks}
    printf("%lu different\\n", different);
    return different != 0;
}}
"""
