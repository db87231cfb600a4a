"""Softmax and norms of a C export: by polynomials (I-BERT), tables (NN-LUT) or shifts (I-ViT)."""

from __future__ import annotations

from collections.abc import Callable

from smelt.export.attributes import integer
from smelt.export.c.constants import literal
from smelt.export.c.writer import SourceWriter
from smelt.runtime.integer.graph import Node

KERNELS = {
    "softmax": """\
void $name(const $X_type *x, $mask_parameters$Y_type *y, size_t rows, size_t length, int64_t levels,
           int64_t reciprocal_bits, const $constants *c)
{
    size_t row, i;
    for (row = 0; row < rows; row++) {
        int64_t peak = INT32_MIN, sum = 0, factor;
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            if ($visible && x[index] > peak) {
                peak = x[index];
            }
        }
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            if ($visible) {
                sum += $exponential(x[index] - peak, c);
            }
        }
        factor = levels * power_of_two(reciprocal_bits) / (sum < 1 ? 1 : sum);
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            int64_t exp = $visible ? $exponential(x[index] - peak, c) : 0;
            y[index] = ($Y_type)round_shift(exp * factor, reciprocal_bits);
        }
    }
}
""",
    "softmax_table": """\
static int64_t ${name}_exp(int64_t x, int64_t lowest, int64_t exp_bits, int64_t exp_shift, const table_constants *exp)
{
    return clamp(round_shift(look_up(clamp(x, lowest, 0), exp), exp_shift), 0, power_of_two(exp_bits));
}

void $name(const $X_type *x, $mask_parameters$Y_type *y, size_t rows, size_t length, int64_t levels,
           int64_t lowest, int64_t exp_bits, int64_t exp_shift, const table_constants *exp,
           const table_constants *reciprocal)
{
    size_t row, i;
    for (row = 0; row < rows; row++) {
        int64_t peak = INT32_MIN, sum = 0, factor, exponent;
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            if ($visible && x[index] > peak) {
                peak = x[index];
            }
        }
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            if ($visible) {
                sum += ${name}_exp(x[index] - peak, lowest, exp_bits, exp_shift, exp);
            }
        }
        sum = sum < 1 ? 1 : sum;
        exponent = floor_log2(sum);
        factor = levels * look_up(shift_left(sum, $reciprocal_input_bits - exponent), reciprocal);
        for (i = 0; i < length; i++) {
            size_t index = row * length + i;
            int64_t value = $visible ? ${name}_exp(x[index] - peak, lowest, exp_bits, exp_shift, exp) : 0;
            y[index] = ($Y_type)clamp(round_shift(value * factor, $result_bits + exponent), 0, levels);
        }
    }
}
""",
    "norm": """\
void $name(const $X_type *x, $Y_type *y, const int32_t *weight, const int32_t *bias, size_t rows, size_t length,
           int64_t epsilon, int64_t shift, int64_t reciprocal_bits, int64_t output_bits)
{
    size_t row, i;
    for (row = 0; row < rows; row++) {
        int64_t mean = 0, sum = epsilon, root, factor;
        if (bias) {
            for (i = 0; i < length; i++) {
                mean += x[row * length + i];
            }
            mean = floor_divide(2 * mean + (int64_t)length, 2 * (int64_t)length);
        }
        for (i = 0; i < length; i++) {
            int64_t value = shift_right(x[row * length + i] - mean, shift);
            sum += value * value;
        }
        root = $root(sum) * power_of_two(shift);
        factor = power_of_two(reciprocal_bits) / (root < 1 ? 1 : root);
        for (i = 0; i < length; i++) {
            int64_t value = (x[row * length + i] - mean) * factor;
            value = round_shift(value, reciprocal_bits - output_bits) * weight[i] + (bias ? bias[i] : 0);
            y[row * length + i] = ($Y_type)value;
        }
    }
}
""",
    "norm_table": """\
void $name(const $X_type *x, $Y_type *y, const int32_t *weight, const int32_t *bias, size_t rows, size_t length,
           int64_t epsilon, int64_t shift, int64_t output_bits, const table_constants *rsqrt)
{
    size_t row, i;
    for (row = 0; row < rows; row++) {
        int64_t mean = 0, sum = epsilon, exponent, factor;
        if (bias) {
            for (i = 0; i < length; i++) {
                mean += x[row * length + i];
            }
            mean = floor_divide(2 * mean + (int64_t)length, 2 * (int64_t)length);
        }
        for (i = 0; i < length; i++) {
            int64_t value = shift_right(x[row * length + i] - mean, shift);
            sum += value * value;
        }
        sum = sum < 1 ? 1 : sum;
        exponent = floor_log2(sum) / 2;
        factor = look_up(shift_left(sum, $rsqrt_input_bits - 2 * exponent), rsqrt);
        for (i = 0; i < length; i++) {
            int64_t value = (x[row * length + i] - mean) * factor;
            value = round_shift(value, $result_bits + exponent + shift - output_bits) * weight[i];
            value += bias ? bias[i] : 0;
            y[row * length + i] = ($Y_type)value;
        }
    }
}
""",
}


def _softmax(writer: SourceWriter, node: Node) -> str:
    x, *mask = node.inputs
    shape = writer.shapes[x]
    parameters = "const $Z_type *mask, const uint32_t *shape, const uint32_t *mask_stride, "
    if mask:
        fields = {"mask_parameters": parameters, "visible": "mask[strided(index, shape, mask_stride)] != 0"}
        arguments = f"{writer.place(mask[0])}, {', '.join(writer.broadcast(mask[0], shape, node))}, "
    else:
        fields, arguments = {"mask_parameters": "", "visible": "1"}, ""
    suffix = "masked" if mask else ""
    sizes = f"{writer.count(x) // shape[-1]}, {shape[-1]}, {integer(node, 'levels')}"
    if node.op == "softmax_shift":
        fields |= {"exponential": "shift_exponential", "constants": "shift_exp_constants"}
        constants = f"{integer(node, 'reciprocal_bits')}, {writer.shift_exp(node)}"
        name = writer.function("softmax", node, suffix=f"shift{suffix}", **fields)
    elif node.op == "softmax":
        fields |= {"exponential": "exponential", "constants": "exp_constants"}
        constants = f"{integer(node, 'reciprocal_bits')}, {writer.exp(node)}"
        name = writer.function("softmax", node, suffix=suffix, **fields)
    else:
        name = writer.function(node.op, node, suffix=suffix, **fields)
        numbers = ", ".join(literal(integer(node, key)) for key in ("lowest", "exp_bits", "exp_shift"))
        constants = f"{numbers}, {writer.table(node, 'exp_')}, {writer.table(node, 'reciprocal_')}"
    return f"{name}({writer.place(x)}, {arguments}{writer.place(node.output)}, {sizes}, {constants});"


def _norm(writer: SourceWriter, node: Node) -> str:
    (x,) = node.inputs
    length = writer.shapes[x][-1]
    weight, bias = writer.constant(node, "weight", "int32"), writer.constant(node, "bias", "int32")
    numbers = [integer(node, "epsilon"), integer(node, "shift")]
    if node.op.endswith("_table"):
        name = writer.function("norm_table", node)
        last = f"{integer(node, 'output_bits')}, {writer.table(node)}"
    else:
        suffix, root = ("shift", "shift_square_root") if node.op.endswith("_shift") else ("", "square_root")
        name = writer.function("norm", node, suffix=suffix, root=root)
        last = f"{integer(node, 'reciprocal_bits')}, {integer(node, 'output_bits')}"
    sizes = f"{writer.count(x) // length}, {length}, {', '.join(map(literal, numbers))}"
    return f"{name}({writer.place(x)}, {writer.place(node.output)}, {weight}, {bias}, {sizes}, {last});"


CALLS: dict[str, Callable[[SourceWriter, Node], str]] = {
    "softmax": _softmax,
    "softmax_table": _softmax,
    "softmax_shift": _softmax,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "layer_norm_table": _norm,
    "rms_norm_table": _norm,
    "layer_norm_shift": _norm,
}
