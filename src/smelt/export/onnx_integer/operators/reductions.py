"""Operators of an integer ONNX graph that reduce axes or windows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from smelt.export.attributes import integer, integers
from smelt.export.onnx_integer.context import OperatorContext
from smelt.runtime.integer.graph import Node


def _mean(context: OperatorContext, node: Node) -> str:
    return context.writer.reduce("ReduceSum", context.long(node.inputs[0]), integer(node, "axis"), keep=False)


def _masked_mean(context: OperatorContext, node: Node) -> str:
    writer, x = context.writer, context.long(node.inputs[0])
    hidden = writer.op("Equal", context.long(node.inputs[1]), writer.constant(0))
    visible = writer.op("Unsqueeze", writer.select(hidden, 0, 1), writer.constant([-1]))
    count = writer.clip(writer.reduce("ReduceSum", visible, 1, keep=False), 1, None)
    total = writer.reduce("ReduceSum", writer.multiply(x, visible), 1, keep=False)
    return writer.floor_divide(writer.add(writer.multiply(total, 2), count), writer.multiply(count, 2))


def _pool(context: OperatorContext, node: Node) -> str:
    """Combine one strided slice per position of the window: ONNX pools only 8-bit and floating point values."""
    writer, x = context.writer, context.long(node.inputs[0])
    kernel, stride = (integers(node, name, 1, 1) for name in ("kernel", "stride"))
    axes = list(range(-len(kernel), 0))
    result = ""
    for position in np.ndindex(*kernel):
        # A negative end leaves as many positions as the first window has; the last one may not reach the border.
        ends = [offset - size + 1 for offset, size in zip(position, kernel, strict=True)]
        piece = writer.op(
            "Slice", x, writer.constant(list(position)), writer.constant([end or 2**62 for end in ends]),
            writer.constant(axes), writer.constant(stride),
        )  # fmt: skip
        combine = writer.add if node.op == "avg_pool" else writer.maximum
        result = piece if not result else combine(result, piece)
    return result


def _argmax(context: OperatorContext, node: Node) -> str:
    writer, x, axis = context.writer, context.long(node.inputs[0]), integer(node, "axis", -1)
    axis %= context.ranks[node.inputs[0]]
    size = writer.axis_length(x, axis)
    positions = writer.op("Range", writer.constant(0), size, writer.constant(1))
    following = context.ranks[node.inputs[0]] - axis - 1
    if following:
        positions = writer.op("Unsqueeze", positions, writer.constant(list(range(1, following + 1))))
    peak = writer.op("Equal", x, writer.reduce("ReduceMax", x, axis))
    return writer.reduce("ReduceMin", writer.select(peak, positions, size), axis, keep=False)


OPERATORS: dict[str, Callable[[OperatorContext, Node], str]] = {
    "mean": _mean,
    "masked_mean": _masked_mean,
    "argmax": _argmax,
    "avg_pool": _pool,
    "max_pool": _pool,
}
