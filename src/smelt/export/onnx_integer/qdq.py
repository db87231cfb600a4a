"""Write an integer graph as an ONNX graph of float operators between QuantizeLinear and DequantizeLinear.

Runtimes fuse such a graph into their 8-bit kernels. 8-bit tensors have the integers of the graph, apart from the
rounding of the float operators between them; wider tensors stay float. An 8-bit tensor has the scale 1 in this graph:
its scales per channel are factors of the operators around it, as they are of the graph's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.export.attributes import integer, integers
from smelt.export.onnx_integer.writer import GraphWriter
from smelt.runtime.integer.graph import IntegerGraph, Node

_NARROW = ("int8", "uint8")
_MASKED = -1e9  # added to the scores of masked positions


class QdqOnnx:
    """Converts the nodes of an integer graph to float operators; every tensor of the result is real-valued."""

    def __init__(self, graph: IntegerGraph, ranks: Mapping[str, int]) -> None:
        self.graph, self.ranks = graph, ranks
        self.writer = GraphWriter()
        self.values: dict[str, str] = {}  # real values, or integers of tensors without a scale (ids, masks)
        self.codes: dict[str, str] = {}  # integers as float, of 8-bit tensors
        for name in graph.inputs:
            self.values[name] = name
            if graph.inputs[name] in _NARROW:
                self._narrow(name, name, graph.inputs[name])
        for node in graph.nodes:
            if node.op not in _OPERATORS:
                raise FormatError(
                    f"the QDQ form of onnx-int has no operator for {node.op!r} of layer {node.layer!r}; "
                    "export without --qdq."
                )
            _OPERATORS[node.op](self, node)
        for name in graph.outputs:
            self.writer.op("Identity", self.values[name], output=name)

    def scale(self, name: str) -> Tensor:
        if name not in self.graph.scales:
            raise FormatError(
                f"the QDQ form of onnx-int needs the scale of {name!r}, which this graph does not have; "
                "export without --qdq."
            )
        return torch.tensor(self.graph.scales[name], dtype=torch.float64).reshape(-1)

    def float(self, values: Tensor | float | list[float]) -> str:
        return self.writer.constant(torch.as_tensor(values, dtype=torch.float64).float(), "float32")

    def channels(self, values: Tensor, name: str, axis: int = -1) -> str:
        """Return factors [1 or channels] in a shape that broadcasts along an axis of a tensor."""
        shape = [1] * self.ranks[name]
        shape[axis] = values.numel()
        return self.float(values.reshape(shape))

    def set(self, name: str, real: str, dtype: str) -> None:
        """Set the real values of a tensor; those of an 8-bit tensor are quantized and dequantized."""
        if dtype in _NARROW:
            scaled = self.writer.op("Mul", real, self.channels(1 / self.scale(name), name))
            self._narrow(name, self._quantize(scaled, dtype), dtype)
        else:
            self.values[name] = real

    def move(self, node: Node, move: Callable[[str], str]) -> None:
        """Apply an operator that only moves values."""
        (x,) = node.inputs
        if x in self.codes:
            self.codes[node.output] = move(self.codes[x])
        if x in self.values:
            self.values[node.output] = move(self.values[x])

    def real(self, name: str) -> str:
        """Return the real values of a tensor, computed from its integers if it is narrow."""
        if name not in self.values:
            self.values[name] = self.writer.op("Mul", self.codes[name], self.channels(self.scale(name), name))
        return self.values[name]

    def weight(self, codes: Tensor, scale: Tensor) -> str:
        """Return an int8 weight [out, ...] with one scale per row."""
        scales = self.float(scale.expand(len(codes)))
        return self.writer.op("DequantizeLinear", self.writer.constant(codes, "int8"), scales, axis=0)

    def _quantize(self, x: str, dtype: str) -> str:
        return self.writer.op("QuantizeLinear", x, self.float(1.0), self.writer.constant(0, dtype))

    def _narrow(self, name: str, integers: str, dtype: str) -> None:
        zero = self.writer.constant(0, dtype)
        self.codes[name] = self.writer.op("DequantizeLinear", integers, self.float(1.0), zero)
        self.values.pop(name, None)


def _linear(graph: QdqOnnx, node: Node) -> None:
    writer, scale = graph.writer, graph.scale(node.output)
    weight = writer.op("Transpose", graph.weight(node.constants["weight"], scale), perm=[1, 0])
    product = writer.op("MatMul", graph.codes[node.inputs[0]], weight)
    bias = node.constants.get("bias")
    graph.values[node.output] = product if bias is None else writer.op("Add", product, graph.float(bias * scale))


def _convolution(graph: QdqOnnx, node: Node) -> None:
    weight, scale = node.constants["weight"], graph.scale(node.output)
    axes = weight.dim() - 2
    strides, pads, dilations = (
        integers(node, name, default, axes) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    bias = node.constants.get("bias")
    graph.values[node.output] = graph.writer.op(
        "Conv", graph.codes[node.inputs[0]], graph.weight(weight, scale),
        *(() if bias is None else (graph.float(bias * scale),)),
        strides=strides, pads=[*pads, *pads], dilations=dilations, group=integer(node, "groups", 1),
    )  # fmt: skip


def _matmul(graph: QdqOnnx, node: Node) -> None:
    writer = graph.writer
    a, b = (graph.codes[name] for name in node.inputs)
    if node.attributes.get("transpose_b", 0):
        rank = graph.ranks[node.inputs[1]]
        b = writer.op("Transpose", b, perm=[*range(rank - 2), rank - 1, rank - 2])
    graph.values[node.output] = writer.op("Mul", writer.op("MatMul", a, b), graph.float(graph.scale(node.output)))


def _embedding(graph: QdqOnnx, node: Node) -> None:
    """Look up real rows, and keep the integers of the table."""
    writer, table = graph.writer, node.constants["table"]
    rows = writer.op(
        "Gather", writer.constant(table, str(table.dtype).removeprefix("torch.")), graph.values[node.inputs[0]]
    )
    if node.dtype in _NARROW:
        graph._narrow(node.output, rows, node.dtype)
    else:
        scales = graph.channels(graph.scale(node.output), node.output)
        graph.values[node.output] = writer.op("Mul", writer.cast(rows, "float32"), scales)


def _positions(graph: QdqOnnx, node: Node) -> None:
    writer, ids, padding = graph.writer, writer_long(graph, node.inputs[0]), integer(node, "padding_index")
    if padding < 0:
        ones = writer.op("Expand", writer.constant(1), writer.op("Shape", ids))
        graph.values[node.output] = writer.subtract(writer.op("CumSum", ones, writer.constant(1)), 1)
        return
    visible = writer.select(writer.op("Equal", ids, writer.constant(padding)), 0, 1)
    counts = writer.op("CumSum", visible, writer.constant(1))
    graph.values[node.output] = writer.add(writer.multiply(counts, visible), padding)


def writer_long(graph: QdqOnnx, name: str) -> str:
    return graph.writer.cast(graph.values[name], "int64")


def _add_positions(graph: QdqOnnx, node: Node) -> None:
    writer, x, table = graph.writer, graph.real(node.inputs[0]), node.constants["table"]
    positions = graph.float(table * graph.scale(node.output))
    graph.values[node.output] = writer.op("Add", writer.pad_tokens(x, len(table)), positions)


def _relative_bias(graph: QdqOnnx, node: Node) -> None:
    writer, x, table = graph.writer, graph.real(node.inputs[0]), node.constants["table"]
    queries, keys = (
        writer.op("Range", writer.constant(0), writer.axis_length(x, axis), writer.constant(1)) for axis in (-2, -1)
    )
    columns = writer.add(
        writer.subtract(keys, writer.op("Unsqueeze", queries, writer.constant([1]))), table.shape[1] // 2
    )
    bias = writer.op("Gather", graph.float(table * graph.scale(node.output)), columns, axis=1)
    graph.values[node.output] = writer.op("Add", x, bias)


def _requantize(graph: QdqOnnx, node: Node) -> None:
    """Clamp wide tensors; QuantizeLinear saturates narrow ones, whose minimum is 0 after a ReLU."""
    writer, real = graph.writer, graph.real(node.inputs[0])
    if node.dtype in _NARROW:
        real = writer.op("Relu", real) if integer(node, "minimum") == 0 else real
    else:
        for kind, name in (("Max", "minimum"), ("Min", "maximum")):
            limit = graph.scale(node.output) * integer(node, name)
            real = writer.op(kind, real, graph.channels(limit, node.output))
    graph.set(node.output, real, node.dtype)


def _add(graph: QdqOnnx, node: Node) -> None:
    graph.set(node.output, graph.writer.op("Add", *(graph.real(name) for name in node.inputs)), node.dtype)


def _gelu(graph: QdqOnnx, node: Node) -> None:
    graph.set(node.output, graph.writer.op("Gelu", graph.real(node.inputs[0])), node.dtype)


def _tanh(graph: QdqOnnx, node: Node) -> None:
    graph.set(node.output, graph.writer.op("Tanh", graph.real(node.inputs[0])), node.dtype)


def _table(graph: QdqOnnx, node: Node) -> None:
    """Look up the table in float."""
    writer, x = graph.writer, graph.real(node.inputs[0])
    input_scale, output_scale = float(graph.scale(node.inputs[0])), float(graph.scale(node.output))
    column = writer.op("Unsqueeze", x, writer.constant([-1]))
    thresholds = graph.float(node.constants["breakpoints"].double() * input_scale)
    reached = writer.cast(writer.op("GreaterOrEqual", column, thresholds), "int64")
    entry = writer.reduce("ReduceSum", reached, -1, keep=False)
    slopes = graph.float(node.constants["slopes"].double() * output_scale / input_scale)
    intercepts = graph.float(node.constants["intercepts"].double() * output_scale)
    product = writer.op("Mul", writer.op("Gather", slopes, entry), x)
    graph.set(node.output, writer.op("Add", product, writer.op("Gather", intercepts, entry)), node.dtype)


def _softmax(graph: QdqOnnx, node: Node) -> None:
    writer, scores = graph.writer, graph.real(node.inputs[0])
    if len(node.inputs) > 1:
        hidden = writer.op("Equal", writer_long(graph, node.inputs[1]), writer.constant(0))
        scores = writer.op("Where", hidden, graph.float(_MASKED), scores)
    graph.set(node.output, writer.op("Softmax", scores, axis=-1), node.dtype)


def _norm(graph: QdqOnnx, node: Node) -> None:
    """Recover weight, bias and epsilon of the float layer from the constants of its integer form."""
    writer, x = graph.writer, graph.real(node.inputs[0])
    q_weight, bits, shift = node.constants["weight"].double(), integer(node, "output_bits"), integer(node, "shift")
    length, scale = q_weight.numel(), graph.scale(node.output)
    weight = q_weight * scale * 2.0**bits / math.sqrt(length)
    epsilon = integer(node, "epsilon") * 4.0**shift * float(graph.scale(node.inputs[0])) ** 2 / length
    if "bias" in node.constants:
        bias = graph.float(node.constants["bias"].double() * scale)
        result = writer.op("LayerNormalization", x, graph.float(weight), bias, axis=-1, epsilon=epsilon)
    else:
        squares = writer.op("ReduceMean", writer.op("Mul", x, x), writer.constant([-1]), keepdims=1)
        root = writer.op("Sqrt", writer.op("Add", squares, graph.float(epsilon)))
        result = writer.op("Mul", writer.op("Div", x, root), graph.float(weight))
    graph.set(node.output, result, node.dtype)


def _mean(graph: QdqOnnx, node: Node) -> None:
    """Sum in units of the input: the scale of the output says what the sum is worth."""
    x = node.inputs[0]
    codes = graph.codes[x] if x in graph.codes else graph.writer.op("Div", graph.real(x), graph.float(graph.scale(x)))
    total = graph.writer.reduce("ReduceSum", codes, integer(node, "axis"), keep=False)
    graph.set(node.output, graph.writer.op("Mul", total, graph.float(graph.scale(node.output))), node.dtype)


def _pool(graph: QdqOnnx, node: Node) -> None:
    writer, (x,) = graph.writer, node.inputs
    codes = graph.codes[x] if x in graph.codes else writer.op("Div", graph.real(x), graph.float(graph.scale(x)))
    kernel, stride = integers(node, "kernel"), integers(node, "stride")
    if node.op == "max_pool":
        pooled = writer.op("MaxPool", codes, kernel_shape=kernel, strides=stride)
    else:
        mean = writer.op("AveragePool", codes, kernel_shape=kernel, strides=stride)
        pooled = writer.op("Mul", mean, graph.float(float(np.prod(kernel))))
    graph.set(node.output, writer.op("Mul", pooled, graph.float(graph.scale(node.output))), node.dtype)


def _reshape(graph: QdqOnnx, node: Node) -> None:
    shape = graph.writer.constant(integers(node, "shape"))
    graph.move(node, lambda x: graph.writer.op("Reshape", x, shape))


def _permute(graph: QdqOnnx, node: Node) -> None:
    graph.move(node, lambda x: graph.writer.op("Transpose", x, perm=integers(node, "axes")))


def _slice(graph: QdqOnnx, node: Node) -> None:
    bounds = [graph.writer.constant([integer(node, name)]) for name in ("start", "stop", "axis")]
    graph.move(node, lambda x: graph.writer.op("Slice", x, *bounds))


_OPERATORS: dict[str, Callable[[QdqOnnx, Node], None]] = {
    "linear": _linear, "matmul": _matmul, "conv1d": _convolution, "conv2d": _convolution, "embedding": _embedding,
    "positions": _positions, "add_positions": _add_positions, "relative_bias": _relative_bias,
    "requantize": _requantize, "add": _add, "gelu": _gelu, "gelu_shift": _gelu, "tanh": _tanh, "table": _table,
    "softmax": _softmax, "softmax_table": _softmax, "softmax_shift": _softmax, "layer_norm": _norm, "rms_norm": _norm,
    "layer_norm_table": _norm, "rms_norm_table": _norm, "layer_norm_shift": _norm, "mean": _mean, "avg_pool": _pool,
    "max_pool": _pool, "reshape": _reshape, "permute": _permute, "slice": _slice,
}  # fmt: skip
