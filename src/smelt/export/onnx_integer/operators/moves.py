"""Operators of an integer ONNX graph that move values: reshape, permute, slice and concatenation."""

from __future__ import annotations

from collections.abc import Callable

from smelt.export.attributes import integer, integers
from smelt.export.onnx_integer.context import OperatorContext
from smelt.runtime.integer.graph import Node


def _reshape(context: OperatorContext, node: Node) -> str:
    return context.writer.op("Reshape", node.inputs[0], context.writer.constant(integers(node, "shape", 0, 1)))


def _permute(context: OperatorContext, node: Node) -> str:
    return context.writer.op("Transpose", node.inputs[0], perm=integers(node, "axes", 0, 1))


def _slice(context: OperatorContext, node: Node) -> str:
    start, stop, axis = (integer(node, name) for name in ("start", "stop", "axis"))
    end = 2**62 if start < 0 and stop == 0 else stop
    return context.writer.op(
        "Slice", node.inputs[0], *(context.writer.constant([value]) for value in (start, end, axis))
    )


def _concat(context: OperatorContext, node: Node) -> str:
    return context.writer.op("Concat", *node.inputs, axis=integer(node, "axis"))


OPERATORS: dict[str, Callable[[OperatorContext, Node], str]] = {
    "reshape": _reshape,
    "permute": _permute,
    "slice": _slice,
    "concat": _concat,
}
