"""Elementwise operators of an integer ONNX graph: requantization, sums, products and activation functions."""

from __future__ import annotations

from collections.abc import Callable

from smelt.export.attributes import integer
from smelt.export.onnx_integer.context import OperatorContext
from smelt.runtime.integer.graph import Node


def _requantize(context: OperatorContext, node: Node) -> str:
    writer, x = context.writer, context.long(node.inputs[0])
    axis = integer(node, "axis", -1)
    shift = node.constants["shift"].long()
    multiplier = context.channels(node.constants["multiplier"].long(), node.inputs[0], axis)
    half = context.channels((1 << shift) >> 1, node.inputs[0], axis)
    divisor = context.channels(1 << shift, node.inputs[0], axis)
    scaled = writer.floor_divide(writer.add(writer.multiply(x, multiplier), half), divisor)
    return writer.clip(scaled, integer(node, "minimum"), integer(node, "maximum"))


def _add(context: OperatorContext, node: Node) -> str:
    return context.writer.add(context.long(node.inputs[0]), context.long(node.inputs[1]))


def _multiply(context: OperatorContext, node: Node) -> str:
    return context.writer.multiply(context.long(node.inputs[0]), context.long(node.inputs[1]))


def _gelu(context: OperatorContext, node: Node) -> str:
    writer, x, q_b = context.writer, context.long(node.inputs[0]), integer(node, "q_b")
    distance = writer.subtract(q_b, writer.clip(writer.op("Abs", x), None, q_b))
    erf = writer.subtract(integer(node, "q_c"), writer.multiply(distance, distance))
    erf = writer.shift_right(writer.multiply(writer.op("Sign", x), erf), integer(node, "shift"))
    return writer.multiply(x, writer.add(erf, integer(node, "q_one")))


def _gelu_shift(context: OperatorContext, node: Node) -> str:
    writer, x = context.writer, context.long(node.inputs[0])
    scaled = x
    for bits in (1, 3, 4):
        scaled = writer.add(scaled, writer.shift_right(x, bits))
    exp = context.shift_exp(writer.op("Neg", writer.op("Abs", scaled)), node)
    one = context.shift_exp(writer.constant(0), node)
    numerator = writer.select(writer.op("Less", scaled, writer.constant(0)), exp, one)
    numerator = writer.multiply(numerator, 1 << integer(node, "sigmoid_bits"))
    return writer.multiply(x, writer.divide(numerator, writer.add(one, exp)))


def _silu(context: OperatorContext, node: Node) -> str:
    writer, x = context.writer, context.long(node.inputs[0])
    exp = context.exp(writer.op("Neg", writer.op("Abs", x)), node)
    one = context.exp(writer.constant(0), node)
    numerator = writer.select(writer.op("Less", x, writer.constant(0)), exp, one)
    sigmoid = writer.divide(writer.multiply(numerator, 1 << integer(node, "bits")), writer.add(exp, one))
    return writer.multiply(x, sigmoid)


def _tanh(context: OperatorContext, node: Node) -> str:
    writer, x, levels = context.writer, context.long(node.inputs[0]), integer(node, "levels")
    exp = context.exp(writer.op("Neg", writer.op("Abs", x)), node)
    one = context.exp(writer.constant(0), node)
    numerator, denominator = writer.subtract(one, exp), writer.add(one, exp)
    rounded = writer.add(writer.multiply(numerator, 2 * levels), denominator)
    return writer.multiply(writer.op("Sign", x), writer.divide(rounded, writer.multiply(denominator, 2)))


def _table(context: OperatorContext, node: Node) -> str:
    return context.table(context.long(node.inputs[0]), node)


def _sqrt(context: OperatorContext, node: Node) -> str:
    return context.square_root(context.long(node.inputs[0]))


OPERATORS: dict[str, Callable[[OperatorContext, Node], str]] = {
    "requantize": _requantize,
    "add": _add,
    "multiply": _multiply,
    "gelu": _gelu,
    "gelu_shift": _gelu_shift,
    "silu": _silu,
    "tanh": _tanh,
    "table": _table,
    "sqrt": _sqrt,
}
