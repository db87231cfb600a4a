"""The operators of an integer graph as C99 functions, each equal to its reference in `runtime/integer/ops.py`.

A file has the operators of one kind: `KERNELS`, templates of C functions, and `CALLS`, which return the statement that
runs a node. In a template, `$X_type`, `$Z_type` and `$Y_type` are the types of the first input, the second one and the
output; a function is written once per combination that a graph uses. Right shifts of negative values are
implementation-defined in C and left shifts undefined, so both are portable functions of `helpers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from smelt.errors import FormatError
from smelt.export.c.operators import elementwise, linear, moves, normalization, positions, reductions
from smelt.export.c.writer import SourceWriter, comment_text
from smelt.runtime.integer.graph import Node

_KINDS = (linear, elementwise, normalization, reductions, positions, moves)
KERNELS: dict[str, str] = {name: template for kind in _KINDS for name, template in kind.KERNELS.items()}
CALLS: dict[str, Callable[[SourceWriter, Node], str]] = {op: call for kind in _KINDS for op, call in kind.CALLS.items()}


def call_lines(writer: SourceWriter, node: Node) -> Iterator[str]:
    """Yield the lines that run a node."""
    if node.output in writer.aliases:
        return
    if node.op not in CALLS:
        raise FormatError(f"an export to c has no function for the operator {node.op!r} of layer {node.layer!r}.")
    text = f"{node.layer}: {node.op} -> {node.output} {list(writer.shapes[node.output])}"
    yield f"    /* {comment_text(text)} */"
    yield f"    {CALLS[node.op](writer, node)}"
