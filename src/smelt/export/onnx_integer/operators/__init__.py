"""The operators of an integer graph as ONNX nodes, each equal to its reference in `runtime/integer/ops.py`.

A file has the operators of one kind; its `OPERATORS` append the nodes of an operator and return the name of the result.
"""

from __future__ import annotations

from collections.abc import Callable

from smelt.export.onnx_integer.context import OperatorContext
from smelt.export.onnx_integer.operators import elementwise, linear, moves, normalization, positions, reductions
from smelt.runtime.integer.graph import Node

_KINDS = (linear, elementwise, normalization, reductions, positions, moves)
OPERATORS: dict[str, Callable[[OperatorContext, Node], str]] = {
    op: convert for kind in _KINDS for op, convert in kind.OPERATORS.items()
}
