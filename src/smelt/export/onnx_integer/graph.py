"""Write an integer graph as an ONNX graph of integer operators, bit-equal to the reference.

Products of 8-bit values are MatMulInteger and ConvInteger. Both operands are unsigned with a zero point of 128, because
the unsigned by signed kernels of some x86 processors saturate. Everything else is int64: ONNX shifts only unsigned
values and its Div truncates, so a right shift is a division by a power of two after the remainder was subtracted.
"""

from __future__ import annotations

from collections.abc import Mapping

from smelt.errors import FormatError
from smelt.export.onnx_integer.context import OperatorContext
from smelt.export.onnx_integer.operators import OPERATORS
from smelt.runtime.integer.graph import IntegerGraph


class IntegerOnnx(OperatorContext):
    """Converts the nodes of an integer graph one by one; `ranks` are the numbers of axes of all tensors."""

    def __init__(self, graph: IntegerGraph, ranks: Mapping[str, int]) -> None:
        super().__init__(graph, ranks)
        for node in graph.nodes:
            if node.op not in OPERATORS:
                raise FormatError(
                    f"an export to onnx-int has no form of the operator {node.op!r} of layer {node.layer!r}."
                )
            result = OPERATORS[node.op](self, node)
            self.writer.cast(result, node.dtype, output=node.output)
            self.dtypes[node.output] = node.dtype
