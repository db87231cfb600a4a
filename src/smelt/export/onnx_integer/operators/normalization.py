"""Softmax and norms of an integer ONNX graph: by polynomials (I-BERT), tables (NN-LUT) or shifts (I-ViT)."""

from __future__ import annotations

from collections.abc import Callable

from smelt.export.attributes import integer
from smelt.export.onnx_integer.context import OperatorContext
from smelt.runtime.integer.graph import Node
from smelt.runtime.integer.table_ops import RECIPROCAL_INPUT_BITS, RESULT_BITS, RSQRT_INPUT_BITS


def _softmax(context: OperatorContext, node: Node) -> str:
    writer, x, levels = context.writer, context.long(node.inputs[0]), integer(node, "levels")
    bits = integer(node, "reciprocal_bits")
    exp_of = context.shift_exp if node.op.endswith("_shift") else context.exp
    exp = _masked_exp(context, node, x, lambda distance: exp_of(distance, node))
    total = writer.clip(writer.reduce("ReduceSum", exp, -1), 1, None)
    factor = writer.divide(writer.constant(levels << bits), total)
    return writer.round_shift(writer.multiply(exp, factor), bits)


def _softmax_table(context: OperatorContext, node: Node) -> str:
    writer, x, levels = context.writer, context.long(node.inputs[0]), integer(node, "levels")

    def exp_of(distance: str) -> str:
        value = context.table(writer.clip(distance, integer(node, "lowest"), 0), node, "exp_")
        return writer.clip(writer.round_shift(value, integer(node, "exp_shift")), 0, 1 << integer(node, "exp_bits"))

    exp = _masked_exp(context, node, x, exp_of)
    total = writer.clip(writer.reduce("ReduceSum", exp, -1), 1, None)
    exponent = context.floor_log2(total)
    mantissa = context.shifted(total, writer.subtract(RECIPROCAL_INPUT_BITS, exponent))
    factor = writer.multiply(context.table(mantissa, node, "reciprocal_"), levels)
    result = writer.round_shift(writer.multiply(exp, factor), writer.add(exponent, RESULT_BITS))
    return writer.clip(result, 0, levels)


def _masked_exp(context: OperatorContext, node: Node, x: str, exp: Callable[[str], str]) -> str:
    """Return exp of the distances to the largest visible value, and zero where the mask is zero."""
    writer = context.writer
    if len(node.inputs) == 1:
        return exp(writer.subtract(x, writer.reduce("ReduceMax", x, -1)))
    hidden = writer.op("Equal", context.long(node.inputs[1]), writer.constant(0))
    peak = writer.reduce("ReduceMax", writer.select(hidden, -(2**31), x), -1)
    return writer.select(hidden, 0, exp(writer.clip(writer.subtract(x, peak), None, 0)))


def _norm(context: OperatorContext, node: Node) -> str:
    writer, x = context.writer, context.long(node.inputs[0])
    bias, shift, output_bits = node.constants.get("bias"), integer(node, "shift"), integer(node, "output_bits")
    if bias is not None:
        length = bias.numel()
        total = writer.add(writer.multiply(writer.reduce("ReduceSum", x, -1), 2), length)
        x = writer.subtract(x, writer.floor_divide(total, 2 * length))
    value = writer.shift_right(x, shift)
    squares = writer.add(writer.reduce("ReduceSum", writer.multiply(value, value), -1), integer(node, "epsilon"))
    if node.op.endswith("_table"):
        squares = writer.clip(squares, 1, None)
        exponent = writer.divide(context.floor_log2(squares), writer.constant(2))
        mantissa = context.shifted(squares, writer.subtract(RSQRT_INPUT_BITS, writer.multiply(exponent, 2)))
        bits = writer.add(exponent, RESULT_BITS + shift - output_bits)
        normalized = writer.round_shift(writer.multiply(x, context.table(mantissa, node)), bits)
    else:
        reciprocal_bits = integer(node, "reciprocal_bits")
        square_root = context.shift_sqrt if node.op.endswith("_shift") else context.square_root
        root = writer.clip(writer.multiply(square_root(squares), 1 << shift), 1, None)
        factor = writer.divide(writer.constant(1 << reciprocal_bits), root)
        normalized = writer.round_shift(writer.multiply(x, factor), reciprocal_bits - output_bits)
    scaled = writer.multiply(normalized, writer.constant(node.constants["weight"]))
    return scaled if bias is None else writer.add(scaled, writer.constant(bias))


OPERATORS: dict[str, Callable[[OperatorContext, Node], str]] = {
    "softmax": _softmax,
    "softmax_table": _softmax_table,
    "softmax_shift": _softmax,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "layer_norm_table": _norm,
    "rms_norm_table": _norm,
    "layer_norm_shift": _norm,
}
