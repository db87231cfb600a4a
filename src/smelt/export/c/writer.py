"""Collect what the calls of a C export need: places in the arena, functions by dtype, constants and structures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from string import Template

import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.export.attributes import integer
from smelt.export.c.arena import plan_arena
from smelt.export.c.constants import Constants, literal
from smelt.runtime.integer.graph import DTYPES, IntegerGraph, Node
from smelt.runtime.integer.run import Interpreter
from smelt.runtime.integer.table_ops import RECIPROCAL_INPUT_BITS, RESULT_BITS, RSQRT_INPUT_BITS

MEMBERS = {"int8": "i8", "uint8": "u8", "int16": "i16", "int32": "i32", "int64": "i64"}
RANK = 6  # axes that broadcasting and permutations support
_EXP_FIELDS = ("q_ln2", "q_b", "q_c", "max_halvings", "lift", "drop")
_SHIFT_EXP_FIELDS = ("q_one", "max_halvings", "lift", "drop")


class SourceWriter:
    """Knows shapes, dtypes and places of all tensors, and collects the functions and constants that calls need."""

    def __init__(self, graph: IntegerGraph, inputs: Mapping[str, Tensor], kernels: Mapping[str, str]) -> None:
        self.graph, self.kernels = graph, kernels
        self.constants = Constants()
        self.identifiers: dict[str, str] = {}
        for name in dict.fromkeys((*graph.inputs, *graph.outputs)):
            plain = re.sub(r"[^A-Za-z0-9]", "_", name)
            self.identifiers[name] = f"{plain}_{len(self.identifiers)}" if plain in self.identifiers.values() else plain
        self.functions: dict[str, str] = {}
        self.structures: dict[tuple[str, str], str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(inputs[name].shape) for name in graph.inputs}
        self.dtypes: dict[str, str] = dict(graph.inputs)
        self.results = {name: inputs[name] for name in graph.outputs if name in graph.inputs}
        for node, tensor in Interpreter(graph).trace(inputs):
            self.shapes[node.output], self.dtypes[node.output] = tuple(tensor.shape), node.dtype
            if node.output in graph.outputs:
                self.results[node.output] = tensor
        aliases = {
            node.output: node.inputs[0]
            for node in graph.nodes
            if node.op == "reshape" and node.dtype == self.dtypes[node.inputs[0]]
        }
        self.aliases = aliases
        sizes = {name: math.prod(shape) * item_bytes(self.dtypes[name]) for name, shape in self.shapes.items()}
        self.arena = plan_arena(graph, sizes, aliases)

    def place(self, name: str, offset: int = 0) -> str:
        """Return the address of a tensor in the arena, plus an offset in elements."""
        dtype = self.dtypes[name]
        return f"arena.{MEMBERS[dtype]} + {self.arena.offsets[name] // item_bytes(dtype) + offset}"

    def count(self, name: str) -> int:
        return math.prod(self.shapes[name])

    def function(self, kernel: str, node: Node, *, suffix: str = "", **fields: str) -> str:
        """Write the function of a kernel for the dtypes of a node, once, and return its name."""
        dtypes = {"X": self.dtypes[node.inputs[0]], "Y": node.dtype}
        if len(node.inputs) > 1:
            dtypes["Z"] = self.dtypes[node.inputs[1]]
        template = Template(self.kernels[kernel]).safe_substitute(fields)
        used = [dtype for key, dtype in dtypes.items() if f"${key}_type" in template]
        name = "_".join(("model", kernel, *([suffix] if suffix else []), *(MEMBERS[dtype] for dtype in used)))
        if name not in self.functions:
            self.functions[name] = Template(template).substitute(
                {f"{key}_type": f"{dtype}_t" for key, dtype in dtypes.items()}, name=name, result_bits=RESULT_BITS,
                rsqrt_input_bits=RSQRT_INPUT_BITS, reciprocal_input_bits=RECIPROCAL_INPUT_BITS,
            )  # fmt: skip
        return name

    def constant(self, node: Node, name: str, dtype: str) -> str:
        """Return the array of a constant, or NULL if the node has none of that name."""
        tensor = node.constants.get(name)
        return "NULL" if tensor is None else self.constants.add(tensor.to(DTYPES[dtype]))

    def structure(self, kind: str, values: str, size: str = "") -> str:
        """Define a static constant of a type, once, and return its name."""
        key = kind + size, values
        if key not in self.structures:
            name = f"{kind.removesuffix('_t')}_{len(self.structures)}"
            self.structures[key] = f"static const {kind} {name}{size} = {{{values}}};"
        return self.structures[key].split(" = ")[0].split()[-1].removesuffix(size)

    def axes(self, values: Sequence[int]) -> str:
        """Define a static array of RANK numbers, and return its name."""
        return self.structure("uint32_t", ", ".join(map(str, values)), "[RANK]")

    def table(self, node: Node, prefix: str = "") -> str:
        parts = (("breakpoints", "int32"), ("slopes", "int32"), ("intercepts", "int64"))
        arrays = [self.constant(node, prefix + part, dtype) for part, dtype in parts]
        return "&" + self.structure(
            "table_constants", f"{node.constants[prefix + 'slopes'].numel()}, {', '.join(arrays)}"
        )

    def exp(self, node: Node) -> str:
        return "&" + self.structure("exp_constants", ", ".join(literal(integer(node, name)) for name in _EXP_FIELDS))

    def shift_exp(self, node: Node) -> str:
        values = ", ".join(literal(integer(node, name)) for name in _SHIFT_EXP_FIELDS)
        return "&" + self.structure("shift_exp_constants", values)

    def broadcast(self, name: str, shape: tuple[int, ...], node: Node) -> tuple[str, str]:
        """Return arrays with a shape of RANK axes, and the strides of a tensor in it; a repeated axis has stride 0."""
        if len(shape) > RANK:
            raise FormatError(f"an export to c supports {RANK} axes, and {node} has {len(shape)}.")
        own = (1,) * (RANK - len(self.shapes[name])) + self.shapes[name]
        full = (1,) * (RANK - len(shape)) + shape
        strides = [0 if own[axis] == 1 else math.prod(own[axis + 1 :]) for axis in range(RANK)]
        return self.axes(full), self.axes(strides)


def in_out(writer: SourceWriter, node: Node) -> str:
    return f"{writer.place(node.inputs[0])}, {writer.place(node.output)}, {writer.count(node.inputs[0])}"


def pair(sizes: tuple[int, ...] | list[int] | torch.Size, missing: int = 1) -> tuple[int, int]:
    """Return height and width; a single axis is the width."""
    return (missing, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def item_bytes(dtype: str) -> int:
    return DTYPES[dtype].itemsize


def comment_text(text: str) -> str:
    """Return text that cannot end a comment: names come from a file."""
    return re.sub(r"[^\w .,:>\[\]-]", "_", text, flags=re.ASCII)
