"""Operators of a C export that move values: reshape, permute, slice and concatenation."""

from __future__ import annotations

import math
from collections.abc import Callable

from smelt.errors import FormatError
from smelt.export.attributes import integer, integers
from smelt.export.c.writer import RANK, SourceWriter
from smelt.runtime.integer.graph import Node

KERNELS = {
    "copy": """\
void $name(const $X_type *x, $Y_type *y, size_t count, const uint32_t *shape, const uint32_t *stride)
{
    size_t i;
    for (i = 0; i < count; i++) {
        y[i] = ($Y_type)x[strided(i, shape, stride)];
    }
}
""",
    "concat": """\
void $name(const $X_type *a, const $Z_type *b, $Y_type *y, size_t outer, size_t a_inner, size_t b_inner)
{
    size_t row, i;
    for (row = 0; row < outer; row++) {
        for (i = 0; i < a_inner; i++) {
            *y++ = ($Y_type)*a++;
        }
        for (i = 0; i < b_inner; i++) {
            *y++ = ($Y_type)*b++;
        }
    }
}
""",
}


def _copy(writer: SourceWriter, node: Node) -> str:
    """Write permute, slice, and a reshape that changes the dtype, as a copy by strides."""
    (x,) = node.inputs
    own, out, offset = writer.shapes[x], writer.shapes[node.output], 0
    if len(out) > RANK:
        raise FormatError(f"an export to c supports {RANK} axes, and {node} has {len(out)}.")
    strides = [math.prod(own[axis + 1 :]) for axis in range(len(own))]
    if node.op == "permute":
        strides = [strides[axis] for axis in integers(node, "axes", 0, 1)]
    elif node.op == "slice":
        axis = integer(node, "axis") % len(own)
        offset += (integer(node, "start") % max(own[axis], 1)) * strides[axis]
    else:
        strides = [math.prod(out[axis + 1 :]) for axis in range(len(out))]
    padding = RANK - len(out)
    arrays = f"{writer.axes([1] * padding + list(out))}, {writer.axes([0] * padding + strides)}"
    name = writer.function("copy", node)
    return f"{name}({writer.place(x, offset)}, {writer.place(node.output)}, {writer.count(node.output)}, {arrays});"


def _concat(writer: SourceWriter, node: Node) -> str:
    a, b = node.inputs
    axis = integer(node, "axis") % len(writer.shapes[a])
    inner = ", ".join(str(math.prod(writer.shapes[name][axis:])) for name in (a, b))
    places = f"{writer.place(a)}, {writer.place(b)}, {writer.place(node.output)}"
    return f"{writer.function('concat', node)}({places}, {math.prod(writer.shapes[a][:axis])}, {inner});"


CALLS: dict[str, Callable[[SourceWriter, Node], str]] = {
    "reshape": _copy,
    "permute": _copy,
    "slice": _copy,
    "concat": _concat,
}
