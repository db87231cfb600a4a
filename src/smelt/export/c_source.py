"""Write an integer graph as C99: constants, one static arena for activations, no heap, no floating point, no library.

`model.h` declares one function with the shapes, memory and scales; `model.c` calls the operators of `kernels.c`;
`constants_N.c` has the weights and tables; `test.c` runs one input and compares the result with the reference.

Operators and calls are separate translation units on purpose. The arena is a union that tensors of several types
share, by pointers to its members; in one unit with the operators, GCC 12 was seen to drop one of the calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.export.arena import Arena, plan_arena
from smelt.export.attributes import integer, integers
from smelt.export.c_decoder_kernels import DECODER_KERNELS
from smelt.export.c_kernels import HELPERS, KERNELS
from smelt.runtime.integer.graph import DTYPES, IntegerGraph, Node, dtype_name
from smelt.runtime.integer.run import Interpreter
from smelt.runtime.integer.shift_ops import SQRT_ITERATIONS
from smelt.runtime.integer.table_ops import RECIPROCAL_INPUT_BITS, RESULT_BITS, RSQRT_INPUT_BITS

MEMBERS = {"int8": "i8", "uint8": "u8", "int16": "i16", "int32": "i32", "int64": "i64"}
RANK = 6  # axes that broadcasting and permutations support
_KERNELS = {**KERNELS, **DECODER_KERNELS}
_VALUES_PER_FILE = 2**22  # compilers need about 160 bytes of memory for each
_STRUCTURES = """\
typedef struct {
    int64_t q_ln2, q_b, q_c, max_halvings, lift, drop;
} exp_constants;

typedef struct {
    int64_t q_one, max_halvings, lift, drop;
} shift_exp_constants;

typedef struct {
    uint32_t entries;
    const int32_t *breakpoints, *slopes;
    const int64_t *intercepts;
} table_constants;

typedef struct {
    uint32_t batch, in, height, width, out, out_height, out_width, groups, group_in, kernel_height, kernel_width;
    uint32_t stride_height, stride_width, padding_height, padding_width, dilation_height, dilation_width;
} convolution;

typedef struct {
    uint32_t planes, height, width, out_height, out_width, kernel_height, kernel_width, stride_height, stride_width;
} pool;
"""
_EXP_FIELDS = ("q_ln2", "q_b", "q_c", "max_halvings", "lift", "drop")
_SHIFT_EXP_FIELDS = ("q_one", "max_halvings", "lift", "drop")


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
    writer = _Writer(graph, inputs)
    body = "\n".join(line for node in graph.nodes for line in writer.call(node))
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


@dataclass
class _Constants:
    """Arrays of constants; equal ones are written once."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    _names: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> str:
        """Return the name of the array that holds a tensor."""
        tensor = tensor.detach().cpu().contiguous()
        key = dtype_name(tensor), tensor.numpy().tobytes()
        if key not in self._names:
            self._names[key] = f"model_constant_{len(self.tensors)}"
            self.tensors[self._names[key]] = tensor
        return self._names[key]

    def files(self) -> dict[str, str]:
        """Return `constants.h` and the files with the arrays."""
        declarations = "".join(
            f"extern const {dtype_name(tensor)}_t {name}[{max(tensor.numel(), 1)}];\n"
            for name, tensor in self.tensors.items()
        )
        guard = "#ifndef MODEL_CONSTANTS_H\n#define MODEL_CONSTANTS_H\n\n#include <stdint.h>\n\n{}\n#endif\n"
        files = {"constants.h": guard.format(declarations)}
        group: list[str] = []
        values = 0
        for name, tensor in self.tensors.items():
            if group and values + tensor.numel() > _VALUES_PER_FILE:
                files[f"constants_{len(files) - 1}.c"] = _constants_file(group)
                group, values = [], 0
            group.append(
                f"const {dtype_name(tensor)}_t {name}[{max(tensor.numel(), 1)}] = {{\n{_values(tensor)}\n}};\n"
            )
            values += tensor.numel()
        return files | ({f"constants_{len(files) - 1}.c": _constants_file(group)} if group else {})


class _Writer:
    """Turns nodes into calls, and collects the functions and constants that they need."""

    def __init__(self, graph: IntegerGraph, inputs: Mapping[str, Tensor]) -> None:
        self.graph = graph
        self.constants = _Constants()
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
        sizes = {name: math.prod(shape) * _bytes(self.dtypes[name]) for name, shape in self.shapes.items()}
        self.arena = plan_arena(graph, sizes, aliases)

    def call(self, node: Node) -> Iterator[str]:
        """Yield the lines that run a node."""
        if node.output in self.aliases:
            return
        if node.op not in _CALLS:
            raise FormatError(f"an export to c has no function for the operator {node.op!r} of layer {node.layer!r}.")
        text = f"{node.layer}: {node.op} -> {node.output} {list(self.shapes[node.output])}"
        yield f"    /* {_comment(text)} */"
        yield f"    {_CALLS[node.op](self, node)}"

    def place(self, name: str, offset: int = 0) -> str:
        """Return the address of a tensor in the arena, plus an offset in elements."""
        dtype = self.dtypes[name]
        return f"arena.{MEMBERS[dtype]} + {self.arena.offsets[name] // _bytes(dtype) + offset}"

    def count(self, name: str) -> int:
        return math.prod(self.shapes[name])

    def function(self, kernel: str, node: Node, *, suffix: str = "", **fields: str) -> str:
        """Write the function of a kernel for the dtypes of a node, once, and return its name."""
        dtypes = {"X": self.dtypes[node.inputs[0]], "Y": node.dtype}
        if len(node.inputs) > 1:
            dtypes["Z"] = self.dtypes[node.inputs[1]]
        template = Template(_KERNELS[kernel]).safe_substitute(fields)
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
        return "&" + self.structure("exp_constants", ", ".join(_literal(integer(node, name)) for name in _EXP_FIELDS))

    def shift_exp(self, node: Node) -> str:
        values = ", ".join(_literal(integer(node, name)) for name in _SHIFT_EXP_FIELDS)
        return "&" + self.structure("shift_exp_constants", values)

    def broadcast(self, name: str, shape: tuple[int, ...], node: Node) -> tuple[str, str]:
        """Return arrays with a shape of RANK axes, and the strides of a tensor in it; a repeated axis has stride 0."""
        if len(shape) > RANK:
            raise FormatError(f"an export to c supports {RANK} axes, and {node} has {len(shape)}.")
        own = (1,) * (RANK - len(self.shapes[name])) + self.shapes[name]
        full = (1,) * (RANK - len(shape)) + shape
        strides = [0 if own[axis] == 1 else math.prod(own[axis + 1 :]) for axis in range(RANK)]
        return self.axes(full), self.axes(strides)


def _linear(writer: _Writer, node: Node) -> str:
    (x,) = node.inputs
    out, width = node.constants["weight"].shape
    weight, bias = writer.constant(node, "weight", "int8"), writer.constant(node, "bias", "int32")
    rows = writer.count(x) // width
    name = writer.function("linear", node)
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, {weight}, {bias}, {rows}, {width}, {out});"


def _matmul(writer: _Writer, node: Node) -> str:
    a, b = node.inputs
    (*batch, m, k), (*other, rows, columns) = writer.shapes[a], writer.shapes[b]
    transposed = integer(node, "transpose_b", 0)
    n, strides = (rows, f"1, {k}") if transposed else (columns, f"{columns}, 1")
    if batch != other:
        raise FormatError(f"an export to c multiplies batches of equal shape, and {node} has {batch} and {other}.")
    sizes = f"{math.prod(batch)}, {m}, {k}, {n}, {strides}"
    name = writer.function("matmul", node)
    return f"{name}({writer.place(a)}, {writer.place(b)}, {writer.place(node.output)}, {sizes});"


def _convolution(writer: _Writer, node: Node) -> str:
    (x,) = node.inputs
    batch, channels, *size = writer.shapes[x]
    out, group_in, *kernel = node.constants["weight"].shape
    height, width = _pair(size)
    fields = [batch, channels, height, width, out, *_pair(writer.shapes[node.output][2:])]
    fields += [integer(node, "groups", 1), group_in, *_pair(kernel), *_pair(integers(node, "stride", 1, len(size)))]
    fields += [*_pair(integers(node, "padding", 0, len(size)), 0), *_pair(integers(node, "dilation", 1, len(size)))]
    structure = writer.structure("convolution", ", ".join(map(str, fields)))
    weight, bias = writer.constant(node, "weight", "int8"), writer.constant(node, "bias", "int32")
    name = writer.function("convolution", node)
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, {weight}, {bias}, &{structure});"


def _embedding(writer: _Writer, node: Node) -> str:
    (ids,) = node.inputs
    table = node.constants["table"]
    dtype = dtype_name(table)
    name = writer.function("embedding", node, suffix=MEMBERS[dtype], T_type=f"{dtype}_t")
    arguments = f"{writer.place(ids)}, {writer.place(node.output)}, {writer.constant(node, 'table', dtype)}"
    sizes = f"{writer.count(ids)}, {table.shape[0]}, {table.shape[1]}"
    return f"if ({name}({arguments}, {sizes})) {{\n        return 1;\n    }}"


def _requantize(writer: _Writer, node: Node) -> str:
    (x,) = node.inputs
    channels = node.constants["multiplier"].numel()
    shape, axis = writer.shapes[x], integer(node, "axis", -1) % len(writer.shapes[x])
    if channels == 1:
        sizes = f"1, 1, {writer.count(x)}"
    else:
        sizes = f"{math.prod(shape[:axis])}, {channels}, {math.prod(shape[axis + 1 :])}"
    limits = f"{_literal(integer(node, 'minimum'))}, {_literal(integer(node, 'maximum'))}"
    multiplier, shift = writer.constant(node, "multiplier", "int32"), writer.constant(node, "shift", "int32")
    name = writer.function("requantize", node)
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, {multiplier}, {shift}, {sizes}, {limits});"


def _binary(writer: _Writer, node: Node) -> str:
    """Write an operator on pairs of elements, whose shapes are broadcast."""
    a, b = node.inputs
    shape = writer.shapes[node.output]
    (full, a_strides), (_, b_strides) = (writer.broadcast(name, shape, node) for name in (a, b))
    places = f"{writer.place(a)}, {writer.place(b)}, {writer.place(node.output)}, {writer.count(node.output)}"
    return f"{writer.function(node.op, node)}({places}, {full}, {a_strides}, {b_strides});"


def _elementwise(*attributes: str) -> Callable[[_Writer, Node], str]:
    """Return the writer of an operator on single elements with these attributes."""

    def call(writer: _Writer, node: Node) -> str:
        values = "".join(f", {_literal(integer(node, name))}" for name in attributes)
        return f"{writer.function(node.op, node)}({_in_out(writer, node)}{values});"

    return call


def _gelu_shift(writer: _Writer, node: Node) -> str:
    name = writer.function("gelu_shift", node)
    return f"{name}({_in_out(writer, node)}, {integer(node, 'sigmoid_bits')}, {writer.shift_exp(node)});"


def _tanh(writer: _Writer, node: Node) -> str:
    name = writer.function("tanh", node)
    return f"{name}({_in_out(writer, node)}, {integer(node, 'levels')}, {writer.exp(node)});"


def _table(writer: _Writer, node: Node) -> str:
    return f"{writer.function('table', node)}({_in_out(writer, node)}, {writer.table(node)});"


def _softmax(writer: _Writer, node: Node) -> str:
    x, *mask = node.inputs
    shape = writer.shapes[x]
    parameters = "const $Z_type *mask, const uint32_t *shape, const uint32_t *mask_stride, "
    if mask:
        fields = {"mask_parameters": parameters, "visible": "mask[strided(index, shape, mask_stride)] != 0"}
        arguments = f"{writer.place(mask[0])}, {', '.join(writer.broadcast(mask[0], shape, node))}, "
    else:
        fields, arguments = {"mask_parameters": "", "visible": "1"}, ""
    suffix = "masked" if mask else ""
    sizes = f"{writer.count(x) // shape[-1]}, {shape[-1]}, {integer(node, 'levels')}"
    if node.op == "softmax_shift":
        fields |= {"exponential": "shift_exponential", "constants": "shift_exp_constants"}
        constants = f"{integer(node, 'reciprocal_bits')}, {writer.shift_exp(node)}"
        name = writer.function("softmax", node, suffix=f"shift{suffix}", **fields)
    elif node.op == "softmax":
        fields |= {"exponential": "exponential", "constants": "exp_constants"}
        constants = f"{integer(node, 'reciprocal_bits')}, {writer.exp(node)}"
        name = writer.function("softmax", node, suffix=suffix, **fields)
    else:
        name = writer.function(node.op, node, suffix=suffix, **fields)
        numbers = ", ".join(_literal(integer(node, key)) for key in ("lowest", "exp_bits", "exp_shift"))
        constants = f"{numbers}, {writer.table(node, 'exp_')}, {writer.table(node, 'reciprocal_')}"
    return f"{name}({writer.place(x)}, {arguments}{writer.place(node.output)}, {sizes}, {constants});"


def _norm(writer: _Writer, node: Node) -> str:
    (x,) = node.inputs
    length = writer.shapes[x][-1]
    weight, bias = writer.constant(node, "weight", "int32"), writer.constant(node, "bias", "int32")
    numbers = [integer(node, "epsilon"), integer(node, "shift")]
    if node.op.endswith("_table"):
        name = writer.function("norm_table", node)
        last = f"{integer(node, 'output_bits')}, {writer.table(node)}"
    else:
        suffix, root = ("shift", "shift_square_root") if node.op.endswith("_shift") else ("", "square_root")
        name = writer.function("norm", node, suffix=suffix, root=root)
        last = f"{integer(node, 'reciprocal_bits')}, {integer(node, 'output_bits')}"
    sizes = f"{writer.count(x) // length}, {length}, {', '.join(map(_literal, numbers))}"
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, {weight}, {bias}, {sizes}, {last});"


def _along_axis(writer: _Writer, node: Node) -> str:
    (x,) = node.inputs
    shape, axis = writer.shapes[x], integer(node, "axis", -1) % len(writer.shapes[x])
    sizes = f"{math.prod(shape[:axis])}, {shape[axis]}, {math.prod(shape[axis + 1 :])}"
    return f"{writer.function(node.op, node)}({writer.place(x)}, {writer.place(node.output)}, {sizes});"


def _masked_mean(writer: _Writer, node: Node) -> str:
    x, mask = node.inputs
    places = f"{writer.place(x)}, {writer.place(mask)}, {writer.place(node.output)}"
    return f"{writer.function('masked_mean', node)}({places}, {', '.join(map(str, writer.shapes[x]))});"


def _pool(writer: _Writer, node: Node) -> str:
    (x,) = node.inputs
    axes = len(integers(node, "kernel", 1, 1))
    shape, out = writer.shapes[x], writer.shapes[node.output]
    fields = [math.prod(shape[:-axes]), *_pair(shape[-axes:]), *_pair(out[-axes:])]
    fields += [*_pair(integers(node, "kernel", 1, axes)), *_pair(integers(node, "stride", 1, axes))]
    if node.op == "avg_pool":
        initial, update = "0", "result += value;"
    else:
        initial, update = "INT64_MIN", "result = value > result ? value : result;"
    name = writer.function("pool", node, suffix=node.op[:3], initial=initial, update=update)
    structure = writer.structure("pool", ", ".join(map(str, fields)))
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, &{structure});"


def _positions(writer: _Writer, node: Node) -> str:
    (ids,) = node.inputs
    batch, tokens = writer.shapes[ids]
    arguments = f"{writer.place(ids)}, {writer.place(node.output)}, {batch}, {tokens}, {integer(node, 'padding_index')}"
    return f"{writer.function('positions', node)}({arguments});"


def _add_positions(writer: _Writer, node: Node) -> str:
    (x,) = node.inputs
    batch, patches, width = writer.shapes[x]
    arguments = f"{writer.place(x)}, {writer.place(node.output)}, {writer.constant(node, 'table', 'int32')}"
    sizes = f"{batch}, {patches}, {node.constants['table'].shape[0]}, {width}"
    return f"{writer.function('add_positions', node)}({arguments}, {sizes});"


def _relative_bias(writer: _Writer, node: Node) -> str:
    (x,) = node.inputs
    table = node.constants["table"]
    dtype = dtype_name(table)
    name = writer.function("relative_bias", node, suffix=MEMBERS[dtype], T_type=f"{dtype}_t")
    sizes = f"{', '.join(map(str, writer.shapes[x]))}, {table.shape[1]}"
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, {writer.constant(node, 'table', dtype)}, {sizes});"


def _causal_mask(writer: _Writer, node: Node) -> str:
    mask, ids = node.inputs
    (batch, keys), queries = writer.shapes[mask], writer.shapes[ids][1]
    sizes = f"{batch}, {integer(node, 'repeats')}, {queries}, {keys}"
    return f"{writer.function('causal_mask', node)}({writer.place(mask)}, {writer.place(node.output)}, {sizes});"


def _rope(writer: _Writer, node: Node) -> str:
    batch, tokens, heads, width = writer.shapes[node.inputs[0]]
    places = ", ".join(writer.place(name) for name in (*node.inputs, node.output))
    return f"{writer.function('rope', node)}({places}, {batch * tokens}, {heads}, {width // 2});"


def _silu(writer: _Writer, node: Node) -> str:
    name = writer.function("silu", node)
    return f"{name}({_in_out(writer, node)}, {integer(node, 'bits')}, {writer.exp(node)});"


def _concat(writer: _Writer, node: Node) -> str:
    a, b = node.inputs
    axis = integer(node, "axis") % len(writer.shapes[a])
    inner = ", ".join(str(math.prod(writer.shapes[name][axis:])) for name in (a, b))
    places = f"{writer.place(a)}, {writer.place(b)}, {writer.place(node.output)}"
    return f"{writer.function('concat', node)}({places}, {math.prod(writer.shapes[a][:axis])}, {inner});"


def _copy(writer: _Writer, node: Node) -> str:
    """Write permute, slice, and a reshape that changes the dtype, as a copy by strides."""
    (x,) = node.inputs
    own, out, offset = writer.shapes[x], writer.shapes[node.output], 0
    if len(out) > RANK:
        raise FormatError(f"an export to c supports {RANK} axes, and {node} has {len(out)}.")
    strides = [math.prod(own[axis + 1 :]) for axis in range(len(own))]
    if node.op == "permute":
        strides = [strides[axis] for axis in integers(node, "axes", 0, 1)]
    elif node.op == "slice":
        axis = integer(node, "axis") % len(own)
        offset += (integer(node, "start") % max(own[axis], 1)) * strides[axis]
    else:
        strides = [math.prod(out[axis + 1 :]) for axis in range(len(out))]
    padding = RANK - len(out)
    arrays = f"{writer.axes([1] * padding + list(out))}, {writer.axes([0] * padding + strides)}"
    name = writer.function("copy", node)
    return f"{name}({writer.place(x, offset)}, {writer.place(node.output)}, {writer.count(node.output)}, {arrays});"


_CALLS: dict[str, Callable[[_Writer, Node], str]] = {
    "linear": _linear, "matmul": _matmul, "conv1d": _convolution, "conv2d": _convolution, "embedding": _embedding,
    "requantize": _requantize, "add": _binary, "multiply": _binary,
    "gelu": _elementwise("q_b", "q_c", "q_one", "shift"), "tanh": _tanh,
    "table": _table, "sqrt": _elementwise(), "softmax": _softmax, "softmax_table": _softmax, "layer_norm": _norm,
    "rms_norm": _norm, "layer_norm_table": _norm, "rms_norm_table": _norm, "mean": _along_axis, "argmax": _along_axis,
    "masked_mean": _masked_mean, "avg_pool": _pool, "max_pool": _pool, "positions": _positions,
    "gelu_shift": _gelu_shift, "softmax_shift": _softmax, "layer_norm_shift": _norm, "add_positions": _add_positions,
    "relative_bias": _relative_bias, "causal_mask": _causal_mask, "rope": _rope, "silu": _silu, "concat": _concat,
    "reshape": _copy, "permute": _copy, "slice": _copy,
}  # fmt: skip


def _in_out(writer: _Writer, node: Node) -> str:
    return f"{writer.place(node.inputs[0])}, {writer.place(node.output)}, {writer.count(node.inputs[0])}"


def _pair(sizes: tuple[int, ...] | list[int] | torch.Size, missing: int = 1) -> tuple[int, int]:
    """Return height and width; a single axis is the width."""
    return (missing, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _literal(value: int) -> str:
    """Return an int64 literal; the smallest one cannot be written as a negated positive one."""
    if value == -(2**63):
        return "INT64_MIN"
    return str(value) if abs(value) < 2**31 else f"INT64_C({value})"


def _values(tensor: Tensor) -> str:
    values = tensor.flatten().tolist() or [0]
    if tensor.dtype == torch.int64:
        texts = [_literal(value) for value in values]
    else:
        texts = ["INT32_MIN" if value == -(2**31) else str(value) for value in values]
    lines = (", ".join(texts[start : start + 20]) for start in range(0, len(texts), 20))
    return ",\n".join(f"    {line}" for line in lines)


def _constants_file(arrays: list[str]) -> str:
    return "\n".join(('#include "constants.h"\n', *arrays))


def _bytes(dtype: str) -> int:
    return DTYPES[dtype].itemsize


def _comment(text: str) -> str:
    """Return text that cannot end a comment: names come from a file."""
    return re.sub(r"[^\w .,:>\[\]-]", "_", text, flags=re.ASCII)


def _layer_memory(graph: IntegerGraph, arena: Arena) -> list[LayerMemory]:
    constants: dict[str, int] = {}
    live: dict[str, int] = {}
    for node, size in zip(graph.nodes, arena.live, strict=True):
        constants[node.layer] = constants.get(node.layer, 0) + sum(tensor.nbytes for tensor in node.constants.values())
        live[node.layer] = max(live.get(node.layer, 0), size)
    return [LayerMemory(layer, constants[layer], live[layer]) for layer in constants]


def _signature(writer: _Writer) -> str:
    inputs = [f"const {writer.dtypes[name]}_t *in_{writer.identifiers[name]}" for name in writer.graph.inputs]
    outputs = [f"{writer.dtypes[name]}_t *out_{writer.identifiers[name]}" for name in writer.graph.outputs]
    return f"int model_run({', '.join((*inputs, *outputs))})"


def _header(writer: _Writer, arena: Arena, layers: list[LayerMemory], constant_bytes: int) -> str:
    graph = writer.graph
    tensors = "".join(
        f" *   {kind}_{writer.identifiers[name]}: {writer.dtypes[name]} {list(writer.shapes[name])}"
        f"{_scale_text(graph, name)}\n"
        for kind, names in (("in", graph.inputs), ("out", graph.outputs))
        for name in names
    )
    width = max([len(each.layer) for each in layers], default=0)
    table = "".join(
        f" *   {_comment(each.layer):<{width}}  {each.constants:>12}  {each.activations:>12}\n" for each in layers
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


def _program(writer: _Writer, body: str, arena: Arena) -> str:
    size = max(arena.size, 8)
    members = "\n".join(f"    {dtype}_t {member}[{size // _bytes(dtype)}];" for dtype, member in MEMBERS.items())
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


def _kernels_header(writer: _Writer) -> str:
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

{_STRUCTURES}
{prototypes}

#endif
"""


def _kernels(writer: _Writer) -> str:
    kernels = "\n".join(writer.functions.values())
    return f"""\
#include "kernels.h"

{_used_helpers(kernels)}
{kernels}"""


def _copies(writer: _Writer, names: list[str], statement: str) -> str:
    return "\n".join(
        f"    for (i = 0; i < {writer.count(name)}; i++) {{\n        "
        + statement.format(place=writer.place(name), name=writer.identifiers[name])
        + "\n    }"
        for name in names
    )


def _used_helpers(kernels: str) -> str:
    """Return the helpers that the kernels call, directly or through each other; an unused function is a warning."""
    blocks = [block for block in re.split(r"\n(?=static |/\*)", "\n" + HELPERS) if block.strip()]
    helpers: list[tuple[str, str]] = []
    comment = ""
    for block in blocks:
        if block.startswith("/*"):
            comment = block + "\n"
            continue
        match = re.match(r"static \w+ (\w+)\(", block.strip())
        assert match is not None
        helpers.append((match[1], comment + block.strip() + "\n"))
        comment = ""
    needed, text = [], kernels
    for name, block in reversed(helpers):  # a helper calls only helpers before it
        if re.search(rf"\b{name}\(", text):
            needed.append(block)
            text += block
    return Template("\n".join(reversed(needed))).substitute(sqrt_iterations=SQRT_ITERATIONS)


def _test(writer: _Writer, inputs: Mapping[str, Tensor]) -> str:
    graph = writer.graph
    vectors = [(f"in_{writer.identifiers[name]}", inputs[name].to(DTYPES[graph.inputs[name]])) for name in graph.inputs]
    vectors += [(f"expected_{writer.identifiers[name]}", writer.results[name]) for name in graph.outputs]
    arrays = "\n".join(
        f"static const {dtype_name(tensor)}_t {name}[{max(tensor.numel(), 1)}] = {{\n{_values(tensor)}\n}};"
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


def write_files(source: CSource, folder: Path) -> None:
    """Write the files of an export into a folder."""
    for name, text in source.files.items():
        (folder / name).write_text(text)
