"""Elementwise operators of a C export: requantization, sums, products and activation functions."""

from __future__ import annotations

import math
from collections.abc import Callable

from smelt.export.attributes import integer
from smelt.export.c.constants import literal
from smelt.export.c.writer import SourceWriter, in_out
from smelt.runtime.integer.graph import Node

KERNELS = {
    "requantize": """\
void $name(const $X_type *x, $Y_type *y, const int32_t *multiplier, const int32_t *shift, size_t outer, size_t channels,
           size_t inner, int64_t minimum, int64_t maximum)
{
    size_t row, channel, i;
    for (row = 0; row < outer; row++) {
        for (channel = 0; channel < channels; channel++) {
            for (i = 0; i < inner; i++) {
                int64_t product = (int64_t)*x++ * multiplier[channel];
                *y++ = ($Y_type)clamp(round_shift(product, shift[channel]), minimum, maximum);
            }
        }
    }
}
""",
    "add": """\
void $name(const $X_type *a, const $Z_type *b, $Y_type *y, size_t count, const uint32_t *shape,
           const uint32_t *a_stride, const uint32_t *b_stride)
{
    size_t i;
    for (i = 0; i < count; i++) {
        y[i] = ($Y_type)((int64_t)a[strided(i, shape, a_stride)]
                                    + b[strided(i, shape, b_stride)]);
    }
}
""",
    "multiply": """\
void $name(const $X_type *a, const $Z_type *b, $Y_type *y, size_t count, const uint32_t *shape,
           const uint32_t *a_stride, const uint32_t *b_stride)
{
    size_t i;
    for (i = 0; i < count; i++) {
        y[i] = ($Y_type)((int64_t)a[strided(i, shape, a_stride)]
                                    * b[strided(i, shape, b_stride)]);
    }
}
""",
    "gelu": """\
void $name(const $X_type *x, $Y_type *y, size_t count, int64_t q_b, int64_t q_c, int64_t q_one, int64_t shift)
{
    size_t i;
    for (i = 0; i < count; i++) {
        int64_t value = x[i], distance = q_b - clamp(magnitude(value), 0, q_b);
        int64_t erf = value == 0 ? 0 : q_c - distance * distance;
        y[i] = ($Y_type)(value * (shift_right(value < 0 ? -erf : erf, shift) + q_one));
    }
}
""",
    "gelu_shift": """\
void $name(const $X_type *x, $Y_type *y, size_t count, int64_t sigmoid_bits, const shift_exp_constants *c)
{
    size_t i;
    int64_t one = shift_exponential(0, c);
    for (i = 0; i < count; i++) {
        int64_t value = x[i], scaled = value + shift_right(value, 1) + shift_right(value, 3) + shift_right(value, 4);
        int64_t exp = shift_exponential(-magnitude(scaled), c);
        y[i] = ($Y_type)(value * ((scaled < 0 ? exp : one) * power_of_two(sigmoid_bits) / (one + exp)));
    }
}
""",
    "silu": """\
void $name(const $X_type *x, $Y_type *y, size_t count, int64_t bits, const exp_constants *c)
{
    size_t i;
    int64_t one = exponential(0, c);
    for (i = 0; i < count; i++) {
        int64_t value = x[i], exp = exponential(-magnitude(value), c);
        y[i] = ($Y_type)(value * ((value < 0 ? exp : one) * power_of_two(bits) / (one + exp)));
    }
}
""",
    "tanh": """\
void $name(const $X_type *x, $Y_type *y, size_t count, int64_t levels, const exp_constants *c)
{
    size_t i;
    int64_t one = exponential(0, c);
    for (i = 0; i < count; i++) {
        int64_t value = x[i], exp = exponential(-magnitude(value), c);
        int64_t result = (2 * levels * (one - exp) + one + exp) / (2 * (one + exp));
        y[i] = ($Y_type)(value < 0 ? -result : value > 0 ? result : 0);
    }
}
""",
    "table": """\
void $name(const $X_type *x, $Y_type *y, size_t count, const table_constants *table)
{
    size_t i;
    for (i = 0; i < count; i++) {
        y[i] = ($Y_type)look_up(x[i], table);
    }
}
""",
    "sqrt": """\
void $name(const $X_type *x, $Y_type *y, size_t count)
{
    size_t i;
    for (i = 0; i < count; i++) {
        y[i] = ($Y_type)square_root(x[i]);
    }
}
""",
}


def _requantize(writer: SourceWriter, node: Node) -> str:
    (x,) = node.inputs
    channels = node.constants["multiplier"].numel()
    shape, axis = writer.shapes[x], integer(node, "axis", -1) % len(writer.shapes[x])
    if channels == 1:
        sizes = f"1, 1, {writer.count(x)}"
    else:
        sizes = f"{math.prod(shape[:axis])}, {channels}, {math.prod(shape[axis + 1 :])}"
    limits = f"{literal(integer(node, 'minimum'))}, {literal(integer(node, 'maximum'))}"
    multiplier, shift = writer.constant(node, "multiplier", "int32"), writer.constant(node, "shift", "int32")
    name = writer.function("requantize", node)
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, {multiplier}, {shift}, {sizes}, {limits});"


def _binary(writer: SourceWriter, node: Node) -> str:
    """Write an operator on pairs of elements, whose shapes are broadcast."""
    a, b = node.inputs
    shape = writer.shapes[node.output]
    (full, a_strides), (_, b_strides) = (writer.broadcast(name, shape, node) for name in (a, b))
    places = f"{writer.place(a)}, {writer.place(b)}, {writer.place(node.output)}, {writer.count(node.output)}"
    return f"{writer.function(node.op, node)}({places}, {full}, {a_strides}, {b_strides});"


def _elementwise(*attributes: str) -> Callable[[SourceWriter, Node], str]:
    """Return the writer of an operator on single elements with these attributes."""

    def call(writer: SourceWriter, node: Node) -> str:
        values = "".join(f", {literal(integer(node, name))}" for name in attributes)
        return f"{writer.function(node.op, node)}({in_out(writer, node)}{values});"

    return call


def _gelu_shift(writer: SourceWriter, node: Node) -> str:
    name = writer.function("gelu_shift", node)
    return f"{name}({in_out(writer, node)}, {integer(node, 'sigmoid_bits')}, {writer.shift_exp(node)});"


def _silu(writer: SourceWriter, node: Node) -> str:
    name = writer.function("silu", node)
    return f"{name}({in_out(writer, node)}, {integer(node, 'bits')}, {writer.exp(node)});"


def _tanh(writer: SourceWriter, node: Node) -> str:
    name = writer.function("tanh", node)
    return f"{name}({in_out(writer, node)}, {integer(node, 'levels')}, {writer.exp(node)});"


def _table(writer: SourceWriter, node: Node) -> str:
    return f"{writer.function('table', node)}({in_out(writer, node)}, {writer.table(node)});"


CALLS: dict[str, Callable[[SourceWriter, Node], str]] = {
    "requantize": _requantize,
    "add": _binary,
    "multiply": _binary,
    "gelu": _elementwise("q_b", "q_c", "q_one", "shift"),
    "gelu_shift": _gelu_shift,
    "silu": _silu,
    "tanh": _tanh,
    "table": _table,
    "sqrt": _elementwise(),
}
