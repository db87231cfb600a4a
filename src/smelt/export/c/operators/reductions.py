"""Operators of a C export that reduce axes or windows."""

from __future__ import annotations

import math
from collections.abc import Callable

from smelt.export.attributes import integer, integers
from smelt.export.c.writer import SourceWriter, pair
from smelt.runtime.integer.graph import Node

KERNELS = {
    "mean": """\
void $name(const $X_type *x, $Y_type *y, size_t outer, size_t length, size_t inner)
{
    size_t row, i, k;
    for (row = 0; row < outer; row++) {
        for (k = 0; k < inner; k++) {
            int64_t sum = 0;
            for (i = 0; i < length; i++) {
                sum += x[(row * length + i) * inner + k];
            }
            y[row * inner + k] = ($Y_type)sum;
        }
    }
}
""",
    "masked_mean": """\
void $name(const $X_type *x, const $Z_type *mask, $Y_type *y, size_t batch, size_t tokens, size_t width)
{
    size_t row, i, k;
    for (row = 0; row < batch; row++) {
        for (k = 0; k < width; k++) {
            int64_t sum = 0, count = 0;
            for (i = 0; i < tokens; i++) {
                if (mask[row * tokens + i] != 0) {
                    sum += x[(row * tokens + i) * width + k];
                    count++;
                }
            }
            count = count < 1 ? 1 : count;
            y[row * width + k] = ($Y_type)floor_divide(2 * sum + count, 2 * count);
        }
    }
}
""",
    "argmax": """\
void $name(const $X_type *x, $Y_type *y, size_t outer, size_t length, size_t inner)
{
    size_t row, i, k;
    for (row = 0; row < outer; row++) {
        for (k = 0; k < inner; k++) {
            size_t best = 0;
            for (i = 1; i < length; i++) {
                if (x[(row * length + i) * inner + k] > x[(row * length + best) * inner + k]) {
                    best = i;
                }
            }
            y[row * inner + k] = ($Y_type)best;
        }
    }
}
""",
    "pool": """\
void $name(const $X_type *x, $Y_type *y, const pool *p)
{
    uint32_t plane, row, column, k, l;
    for (plane = 0; plane < p->planes; plane++) {
        for (row = 0; row < p->out_height; row++) {
            for (column = 0; column < p->out_width; column++) {
                const $X_type *corner = x + ((size_t)plane * p->height + row * p->stride_height) * p->width
                                + column * p->stride_width;
                int64_t result = $initial;
                for (k = 0; k < p->kernel_height; k++) {
                    for (l = 0; l < p->kernel_width; l++) {
                        int64_t value = corner[(size_t)k * p->width + l];
                        $update
                    }
                }
                *y++ = ($Y_type)result;
            }
        }
    }
}
""",
}


def _along_axis(writer: SourceWriter, node: Node) -> str:
    (x,) = node.inputs
    shape, axis = writer.shapes[x], integer(node, "axis", -1) % len(writer.shapes[x])
    sizes = f"{math.prod(shape[:axis])}, {shape[axis]}, {math.prod(shape[axis + 1 :])}"
    return f"{writer.function(node.op, node)}({writer.place(x)}, {writer.place(node.output)}, {sizes});"


def _masked_mean(writer: SourceWriter, node: Node) -> str:
    x, mask = node.inputs
    places = f"{writer.place(x)}, {writer.place(mask)}, {writer.place(node.output)}"
    return f"{writer.function('masked_mean', node)}({places}, {', '.join(map(str, writer.shapes[x]))});"


def _pool(writer: SourceWriter, node: Node) -> str:
    (x,) = node.inputs
    axes = len(integers(node, "kernel", 1, 1))
    shape, out = writer.shapes[x], writer.shapes[node.output]
    fields = [math.prod(shape[:-axes]), *pair(shape[-axes:]), *pair(out[-axes:])]
    fields += [*pair(integers(node, "kernel", 1, axes)), *pair(integers(node, "stride", 1, axes))]
    if node.op == "avg_pool":
        initial, update = "0", "result += value;"
    else:
        initial, update = "INT64_MIN", "result = value > result ? value : result;"
    name = writer.function("pool", node, suffix=node.op[:3], initial=initial, update=update)
    structure = writer.structure("pool", ", ".join(map(str, fields)))
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, &{structure});"


CALLS: dict[str, Callable[[SourceWriter, Node], str]] = {
    "mean": _along_axis,
    "masked_mean": _masked_mean,
    "argmax": _along_axis,
    "avg_pool": _pool,
    "max_pool": _pool,
}
