"""Operators of an integer ONNX graph for the positions of tokens: embeddings of positions, RoPE, and causal masks."""

from __future__ import annotations

from collections.abc import Callable

from smelt.export.attributes import integer
from smelt.export.onnx_integer.context import OperatorContext
from smelt.runtime.integer.graph import Node


def _positions(context: OperatorContext, node: Node) -> str:
    writer, ids, padding_index = context.writer, context.long(node.inputs[0]), integer(node, "padding_index")
    if padding_index < 0:
        visible = writer.op("Expand", writer.constant(1), writer.op("Shape", ids))
        return writer.subtract(writer.op("CumSum", visible, writer.constant(1)), 1)
    visible = writer.select(writer.op("Equal", ids, writer.constant(padding_index)), 0, 1)
    counts = writer.op("CumSum", visible, writer.constant(1))
    return writer.add(writer.multiply(counts, visible), padding_index)


def _add_positions(context: OperatorContext, node: Node) -> str:
    writer, x, table = context.writer, context.long(node.inputs[0]), node.constants["table"]
    return writer.add(writer.pad_tokens(x, len(table)), writer.constant(table))


def _relative_bias(context: OperatorContext, node: Node) -> str:
    writer, x, table = context.writer, context.long(node.inputs[0]), node.constants["table"]
    queries, keys = (
        writer.op("Range", writer.constant(0), writer.axis_length(x, axis), writer.constant(1)) for axis in (-2, -1)
    )
    distances = writer.subtract(keys, writer.op("Unsqueeze", queries, writer.constant([1])))
    columns = writer.add(distances, table.shape[1] // 2)
    return writer.add(x, writer.op("Gather", writer.constant(table), columns, axis=1))


def _rope(context: OperatorContext, node: Node) -> str:
    writer = context.writer
    x, cos, sin = (context.long(name) for name in node.inputs)
    cos, sin = (writer.op("Unsqueeze", part, writer.constant([2])) for part in (cos, sin))
    half = writer.op("Unsqueeze", writer.axis_length(cos, -1), writer.constant([0]))
    axis = writer.constant([-1])
    first = writer.op("Slice", x, writer.constant([0]), half, axis)
    second = writer.op("Slice", x, half, writer.constant([2**62]), axis)
    rotated = (
        writer.op("Sub", writer.multiply(first, cos), writer.multiply(second, sin)),
        writer.add(writer.multiply(second, cos), writer.multiply(first, sin)),
    )
    return writer.op("Concat", *rotated, axis=-1)


def _causal_mask(context: OperatorContext, node: Node) -> str:
    writer, mask = context.writer, context.long(node.inputs[0])
    keys, queries = writer.axis_length(mask, -1), writer.axis_length(node.inputs[1], -1)
    columns, rows = (writer.op("Range", writer.constant(0), length, writer.constant(1)) for length in (keys, queries))
    last_key = writer.op("Unsqueeze", writer.add(rows, writer.subtract(keys, queries)), writer.constant([1]))
    visible = writer.op("LessOrEqual", columns, last_key)
    shown = writer.op("Unsqueeze", writer.op("Not", writer.op("Equal", mask, writer.constant(0))), writer.constant([1]))
    both = writer.cast(writer.op("And", visible, shown), "int64")
    tiled = writer.op("Tile", both, writer.constant([1, integer(node, "repeats"), 1]))
    return writer.op("Unsqueeze", tiled, writer.constant([1]))


OPERATORS: dict[str, Callable[[OperatorContext, Node], str]] = {
    "positions": _positions,
    "add_positions": _add_positions,
    "relative_bias": _relative_bias,
    "rope": _rope,
    "causal_mask": _causal_mask,
}
