"""Linear operators of an integer ONNX graph: products of 8-bit integers, convolutions, and embeddings."""

from __future__ import annotations

from collections.abc import Callable

from smelt.export.attributes import integer, integers
from smelt.export.onnx_integer.context import OperatorContext
from smelt.runtime.integer.graph import Node


def _linear(context: OperatorContext, node: Node) -> str:
    x, zero = context.unsigned(node.inputs[0])
    weight, weight_zero = context.unsigned_weight(node.constants["weight"].T.contiguous())
    product = context.writer.op("MatMulInteger", x, weight, zero, weight_zero)
    return _with_bias(context, product, node, [-1])


def _with_bias(context: OperatorContext, product: str, node: Node, shape: list[int]) -> str:
    bias = node.constants.get("bias")
    if bias is None:
        return product
    return context.writer.op("Add", product, context.writer.constant(bias.reshape(shape), "int32"))


def _matmul(context: OperatorContext, node: Node) -> str:
    """Multiply 8-bit values by MatMulInteger and wider ones as int64."""
    narrow = all(context.dtypes[name] in ("int8", "uint8") for name in node.inputs)
    (a, *a_zero), (b, *b_zero) = (context.unsigned(name) if narrow else (context.long(name),) for name in node.inputs)
    if node.attributes.get("transpose_b", 0):
        rank = context.ranks[node.inputs[1]]
        b = context.writer.op("Transpose", b, perm=[*range(rank - 2), rank - 1, rank - 2])
    return context.writer.op("MatMulInteger" if narrow else "MatMul", a, b, *a_zero, *b_zero)


def _convolution(context: OperatorContext, node: Node) -> str:
    weight = node.constants["weight"]
    axes = weight.dim() - 2
    strides, pads, dilations = (
        integers(node, name, default, axes) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    x, zero = context.unsigned(node.inputs[0])
    product = context.writer.op(
        "ConvInteger", x, *_interleave(context.unsigned_weight(weight), zero),
        strides=strides, pads=[*pads, *pads], dilations=dilations, group=integer(node, "groups", 1),
    )  # fmt: skip
    return _with_bias(context, product, node, [-1] + [1] * axes)


def _interleave(weight: tuple[str, str], zero: str) -> tuple[str, str, str]:
    return weight[0], zero, weight[1]


def _embedding(context: OperatorContext, node: Node) -> str:
    table = node.constants["table"]
    return context.writer.op(
        "Gather", context.writer.constant(table, str(table.dtype).removeprefix("torch.")), context.long(node.inputs[0])
    )


OPERATORS: dict[str, Callable[[OperatorContext, Node], str]] = {
    "linear": _linear,
    "matmul": _matmul,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "embedding": _embedding,
}
