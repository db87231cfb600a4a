"""Linear operators of a C export: products of 8-bit integers, convolutions, and embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable

from smelt.errors import FormatError
from smelt.export.attributes import integer, integers
from smelt.export.c.writer import MEMBERS, SourceWriter, pair
from smelt.runtime.integer.graph import Node, dtype_name

KERNELS = {
    "linear": """\
void $name(const $X_type *x, $Y_type *y, const int8_t *weight, const int32_t *bias, size_t rows, size_t in, size_t out)
{
    size_t row, column, i;
    for (row = 0; row < rows; row++) {
        for (column = 0; column < out; column++) {
            int32_t sum = bias ? bias[column] : 0;
            for (i = 0; i < in; i++) {
                sum += (int32_t)x[row * in + i] * weight[column * in + i];
            }
            y[row * out + column] = ($Y_type)sum;
        }
    }
}
""",
    "matmul": """\
void $name(const $X_type *a, const $Z_type *b, $Y_type *y, size_t batch, size_t m, size_t k, size_t n, size_t b_row,
           size_t b_column)
{
    size_t index, row, column, i;
    for (index = 0; index < batch; index++) {
        for (row = 0; row < m; row++) {
            for (column = 0; column < n; column++) {
                int32_t sum = 0;
                for (i = 0; i < k; i++) {
                    sum += (int32_t)a[(index * m + row) * k + i]
                           * b[index * k * n + i * b_row + column * b_column];
                }
                y[(index * m + row) * n + column] = ($Y_type)sum;
            }
        }
    }
}
""",
    "convolution": """\
void $name(const $X_type *x, $Y_type *y, const int8_t *weight, const int32_t *bias, const convolution *c)
{
    uint32_t image, channel, row, column, i, k, l;
    for (image = 0; image < c->batch; image++) {
        for (channel = 0; channel < c->out; channel++) {
            uint32_t first = channel / (c->out / c->groups) * c->group_in;
            for (row = 0; row < c->out_height; row++) {
                for (column = 0; column < c->out_width; column++) {
                    int32_t sum = bias ? bias[channel] : 0;
                    for (i = 0; i < c->group_in; i++) {
                        for (k = 0; k < c->kernel_height; k++) {
                            uint32_t in_row = row * c->stride_height + k * c->dilation_height;
                            if (in_row < c->padding_height || in_row >= c->height + c->padding_height) {
                                continue;
                            }
                            for (l = 0; l < c->kernel_width; l++) {
                                uint32_t in_column = column * c->stride_width + l * c->dilation_width;
                                if (in_column < c->padding_width || in_column >= c->width + c->padding_width) {
                                    continue;
                                }
                                sum += (int32_t)x[(((size_t)image * c->in + first + i) * c->height + in_row
                                              - c->padding_height) * c->width
                                           + in_column - c->padding_width]
                                       * weight[(((size_t)channel * c->group_in + i) * c->kernel_height + k)
                                                * c->kernel_width + l];
                            }
                        }
                    }
                    *y++ = ($Y_type)sum;
                }
            }
        }
    }
}
""",
    "embedding": """\
int $name(const $X_type *x, $Y_type *y, const $T_type *table, size_t count, size_t rows, size_t width)
{
    size_t index, i;
    for (index = 0; index < count; index++) {
        int64_t id = x[index];
        if (id < 0 || id >= (int64_t)rows) {
            return 1;
        }
        for (i = 0; i < width; i++) {
            y[index * width + i] = ($Y_type)table[(size_t)id * width + i];
        }
    }
    return 0;
}
""",
}


def _linear(writer: SourceWriter, node: Node) -> str:
    (x,) = node.inputs
    out, width = node.constants["weight"].shape
    weight, bias = writer.constant(node, "weight", "int8"), writer.constant(node, "bias", "int32")
    rows = writer.count(x) // width
    name = writer.function("linear", node)
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, {weight}, {bias}, {rows}, {width}, {out});"


def _matmul(writer: SourceWriter, node: Node) -> str:
    a, b = node.inputs
    (*batch, m, k), (*other, rows, columns) = writer.shapes[a], writer.shapes[b]
    transposed = integer(node, "transpose_b", 0)
    n, strides = (rows, f"1, {k}") if transposed else (columns, f"{columns}, 1")
    if batch != other:
        raise FormatError(f"an export to c multiplies batches of equal shape, and {node} has {batch} and {other}.")
    sizes = f"{math.prod(batch)}, {m}, {k}, {n}, {strides}"
    name = writer.function("matmul", node)
    return f"{name}({writer.place(a)}, {writer.place(b)}, {writer.place(node.output)}, {sizes});"


def _convolution(writer: SourceWriter, node: Node) -> str:
    (x,) = node.inputs
    batch, channels, *size = writer.shapes[x]
    out, group_in, *kernel = node.constants["weight"].shape
    height, width = pair(size)
    fields = [batch, channels, height, width, out, *pair(writer.shapes[node.output][2:])]
    fields += [integer(node, "groups", 1), group_in, *pair(kernel), *pair(integers(node, "stride", 1, len(size)))]
    fields += [*pair(integers(node, "padding", 0, len(size)), 0), *pair(integers(node, "dilation", 1, len(size)))]
    structure = writer.structure("convolution", ", ".join(map(str, fields)))
    weight, bias = writer.constant(node, "weight", "int8"), writer.constant(node, "bias", "int32")
    name = writer.function("convolution", node)
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, {weight}, {bias}, &{structure});"


def _embedding(writer: SourceWriter, node: Node) -> str:
    (ids,) = node.inputs
    table = node.constants["table"]
    dtype = dtype_name(table)
    name = writer.function("embedding", node, suffix=MEMBERS[dtype], T_type=f"{dtype}_t")
    arguments = f"{writer.place(ids)}, {writer.place(node.output)}, {writer.constant(node, 'table', dtype)}"
    sizes = f"{writer.count(ids)}, {table.shape[0]}, {table.shape[1]}"
    return f"if ({name}({arguments}, {sizes})) {{\n        return 1;\n    }}"


CALLS: dict[str, Callable[[SourceWriter, Node], str]] = {
    "linear": _linear,
    "matmul": _matmul,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "embedding": _embedding,
}
