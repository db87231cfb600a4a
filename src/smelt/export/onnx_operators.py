"""Write an integer graph as an ONNX graph of integer operators, bit-equal to the reference.

Products of 8-bit values are MatMulInteger and ConvInteger. Both operands are unsigned with a zero point of 128, because
the unsigned by signed kernels of some x86 processors saturate. Everything else is int64: ONNX shifts only unsigned
values and its Div truncates, so a right shift is a division by a power of two after the remainder was subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from smelt.errors import FormatError
from smelt.export.attributes import integer, integers
from smelt.runtime.integer.graph import IntegerGraph, Node
from smelt.runtime.integer.shift_ops import SQRT_ITERATIONS
from smelt.runtime.integer.table_ops import RECIPROCAL_INPUT_BITS, RESULT_BITS, RSQRT_INPUT_BITS

OPSET = 20
_NEWTON_STEPS = 8  # quadratic convergence from less than twice the root: 2^31 needs 6
_EXP_NAMES = ("q_ln2", "q_b", "q_c", "max_halvings", "lift", "drop")
_SHIFT_EXP_NAMES = ("q_one", "max_halvings", "lift", "drop")


class GraphWriter:
    """Collects ONNX nodes and constants; operators return the name of their result."""

    def __init__(self) -> None:
        from onnx import helper, numpy_helper

        self._helper, self._numpy_helper = helper, numpy_helper
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def op(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Add a node and return the name of its (single) output."""
        name = output or f"_{len(self.nodes)}"
        self.nodes.append(self._helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any, dtype: str = "int64") -> str:
        """Return the name of a constant; equal ones are stored once."""
        array = np.ascontiguousarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value, dtype=dtype)
        array = array if np.ndim(value) or isinstance(value, Tensor) else array.reshape(())
        key = dtype, array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            self.initializers.append(self._numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def cast(self, x: str, dtype: str, output: str | None = None) -> str:
        return self.op("Cast", x, output=output, to=self._helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    # Arithmetic on int64; a number becomes a constant.

    def add(self, a: str, b: str | int) -> str:
        return self.op("Add", a, self._operand(b))

    def subtract(self, a: str | int, b: str | int) -> str:
        return self.op("Sub", self._operand(a), self._operand(b))

    def multiply(self, a: str, b: str | int) -> str:
        return self.op("Mul", a, self._operand(b))

    def divide(self, a: str, b: str) -> str:
        """Divide values that are not negative, for which truncation is the floor."""
        return self.op("Div", a, b)

    def floor_divide(self, a: str, b: str | int) -> str:
        """Divide by positive values, rounding toward minus infinity."""
        divisor = self._operand(b)
        return self.op("Div", self.op("Sub", a, self.op("Mod", a, divisor)), divisor)

    def shift_right(self, x: str, bits: int) -> str:
        return self.floor_divide(x, 1 << bits) if bits else x

    def power_of_two(self, bits: str) -> str:
        """Return 2^bits for a tensor of bits, at most 2^62: a shift by more leaves the sign, as this one does."""
        powers = self.constant([1 << index for index in range(63)])
        return self.op("Gather", powers, self.clip(bits, 0, 62))

    def round_shift(self, x: str, bits: int | str) -> str:
        """Shift to the right by bits (positive, if they are a tensor), rounding half up."""
        if isinstance(bits, int):
            return self.floor_divide(self.add(x, 1 << (bits - 1)), 1 << bits) if bits else x
        half = self.power_of_two(self.subtract(bits, 1))
        return self.floor_divide(self.add(x, half), self.multiply(half, 2))

    # Comparisons, since Max, Min and Clip of onnxruntime are wrong on x86 for int64 values that do not fit into int32
    # (an error of Eigen, onnxruntime pull request 32475). ReduceMax and ReduceMin get int32 values only.

    def maximum(self, a: str, b: str | int) -> str:
        return self.select(self.op("Greater", a, self._operand(b)), a, b)

    def minimum(self, a: str, b: str | int) -> str:
        return self.select(self.op("Less", a, self._operand(b)), a, b)

    def clip(self, x: str, minimum: int | None, maximum: int | None) -> str:
        x = x if minimum is None else self.maximum(x, minimum)
        return x if maximum is None else self.minimum(x, maximum)

    def reduce(self, kind: str, x: str, axis: int, *, keep: bool = True) -> str:
        return self.op(kind, x, self.constant([axis]), keepdims=int(keep))

    def count_at_least(self, x: str, thresholds: Tensor | list[int]) -> str:
        """Return for every element the number of thresholds that it reaches."""
        column = self.op("Unsqueeze", x, self.constant([-1]))
        reached = self.cast(self.op("GreaterOrEqual", column, self.constant(thresholds)), "int64")
        return self.reduce("ReduceSum", reached, -1, keep=False)

    def select(self, condition: str, a: str | int, b: str | int) -> str:
        return self.op("Where", condition, self._operand(a), self._operand(b))

    def axis_length(self, x: str, axis: int) -> str:
        """Return the length of an axis as a scalar, which may differ from run to run."""
        return self.op("Gather", self.op("Shape", x), self.constant(axis))

    def pad_tokens(self, x: str, length: int) -> str:
        """Add tokens of zeros before those of x [batch, tokens, width], up to a length."""
        before, zero = self.subtract(length, self.axis_length(x, 1)), self.constant([0])
        pads = self.op("Concat", zero, self.op("Unsqueeze", before, zero), self.constant([0, 0, 0, 0]), axis=0)
        return self.op("Pad", x, pads)

    def _operand(self, value: str | int) -> str:
        return self.constant(value) if isinstance(value, int) else value


class IntegerOnnx:
    """Converts the nodes of an integer graph one by one; `ranks` are the numbers of axes of all tensors."""

    def __init__(self, graph: IntegerGraph, ranks: Mapping[str, int]) -> None:
        self.ranks = ranks
        self.dtypes = dict(graph.inputs)
        self.writer = GraphWriter()
        for node in graph.nodes:
            if node.op not in _OPERATORS:
                raise FormatError(
                    f"an export to onnx-int has no form of the operator {node.op!r} of layer {node.layer!r}."
                )
            result = _OPERATORS[node.op](self, node)
            self.writer.cast(result, node.dtype, output=node.output)
            self.dtypes[node.output] = node.dtype

    def long(self, name: str) -> str:
        return name if self.dtypes[name] == "int64" else self.writer.cast(name, "int64")

    def unsigned(self, name: str) -> tuple[str, str]:
        """Return 8-bit values as uint8, and their zero point."""
        if self.dtypes[name] == "uint8":
            return name, self.writer.constant(0, "uint8")
        if self.dtypes[name] != "int8":
            raise FormatError(f"an export to onnx-int multiplies 8-bit integers, and {name!r} is {self.dtypes[name]}.")
        shifted = self.writer.op("Add", self.writer.cast(name, "int32"), self.writer.constant(128, "int32"))
        return self.writer.cast(shifted, "uint8"), self.writer.constant(128, "uint8")

    def unsigned_weight(self, weight: Tensor) -> tuple[str, str]:
        return self.writer.constant(weight.short() + 128, "uint8"), self.writer.constant(128, "uint8")

    def table(self, x: str, node: Node, prefix: str = "") -> str:
        writer = self.writer
        entry = writer.count_at_least(x, node.constants[f"{prefix}breakpoints"])
        slope, intercept = (
            writer.op("Gather", writer.constant(node.constants[f"{prefix}{part}"]), entry)
            for part in ("slopes", "intercepts")
        )
        return writer.add(writer.multiply(slope, x), intercept)

    def exp(self, x: str, node: Node) -> str:
        writer = self.writer
        q_ln2, q_b, q_c, max_halvings, lift, drop = (integer(node, name) for name in _EXP_NAMES)
        x = writer.clip(x, -max_halvings * q_ln2, None)
        halvings = writer.divide(writer.op("Neg", x), writer.constant(q_ln2))
        rest = writer.add(x, writer.multiply(halvings, q_ln2))
        polynomial = writer.add(writer.multiply(rest, writer.add(rest, q_b)), q_c)
        divisor = writer.power_of_two(writer.add(halvings, drop))
        return writer.floor_divide(writer.multiply(polynomial, 1 << lift), divisor)

    def shift_exp(self, x: str, node: Node) -> str:
        writer = self.writer
        q_one, max_halvings, lift, drop = (integer(node, name) for name in _SHIFT_EXP_NAMES)
        x = writer.subtract(writer.add(x, writer.shift_right(x, 1)), writer.shift_right(x, 4))
        x = writer.clip(x, -max_halvings * q_one, None)
        halvings = writer.divide(writer.op("Neg", x), writer.constant(q_one))
        rest = writer.add(x, writer.multiply(halvings, q_one))
        line = writer.add(writer.shift_right(rest, 1), q_one)
        return writer.floor_divide(writer.multiply(line, 1 << lift), writer.power_of_two(writer.add(halvings, drop)))

    def shift_sqrt(self, x: str) -> str:
        writer = self.writer
        positive = writer.clip(x, 1, None)
        bits = writer.add(self.floor_log2(positive), 1)
        root = writer.power_of_two(writer.divide(bits, writer.constant(2)))
        for _ in range(SQRT_ITERATIONS):
            root = writer.divide(writer.add(writer.divide(positive, root), root), writer.constant(2))
        return writer.select(writer.op("Greater", x, writer.constant(0)), root, 0)

    def square_root(self, x: str) -> str:
        writer = self.writer
        positive = writer.clip(x, 1, None)
        root = writer.power_of_two(writer.count_at_least(positive, [4**bits for bits in range(31)]))
        for _ in range(_NEWTON_STEPS):
            smaller = writer.divide(writer.add(writer.divide(positive, root), root), writer.constant(2))
            root = writer.minimum(root, smaller)
        return writer.select(writer.op("Greater", x, writer.constant(0)), root, 0)

    def floor_log2(self, x: str) -> str:
        return self.writer.count_at_least(x, [1 << bits for bits in range(1, 63)])

    def shifted(self, x: str, bits: str) -> str:
        """Shift values that are not negative to the left by bits, or to the right where these are negative."""
        writer = self.writer
        return writer.divide(
            writer.multiply(x, writer.power_of_two(bits)), writer.power_of_two(writer.op("Neg", bits))
        )  # one of both powers is 1

    def channels(self, values: Tensor, name: str, axis: int) -> str:
        """Return constants [1 or channels] in the shape that broadcasts along an axis of a tensor."""
        shape = [1] * self.ranks[name]
        if shape:
            shape[axis] = values.numel()
        return self.writer.constant(values.reshape(shape))


def _linear(graph: IntegerOnnx, node: Node) -> str:
    x, zero = graph.unsigned(node.inputs[0])
    weight, weight_zero = graph.unsigned_weight(node.constants["weight"].T.contiguous())
    product = graph.writer.op("MatMulInteger", x, weight, zero, weight_zero)
    return _with_bias(graph, product, node, [-1])


def _with_bias(graph: IntegerOnnx, product: str, node: Node, shape: list[int]) -> str:
    bias = node.constants.get("bias")
    if bias is None:
        return product
    return graph.writer.op("Add", product, graph.writer.constant(bias.reshape(shape), "int32"))


def _matmul(graph: IntegerOnnx, node: Node) -> str:
    """Multiply 8-bit values by MatMulInteger and wider ones as int64."""
    narrow = all(graph.dtypes[name] in ("int8", "uint8") for name in node.inputs)
    (a, *a_zero), (b, *b_zero) = (graph.unsigned(name) if narrow else (graph.long(name),) for name in node.inputs)
    if node.attributes.get("transpose_b", 0):
        rank = graph.ranks[node.inputs[1]]
        b = graph.writer.op("Transpose", b, perm=[*range(rank - 2), rank - 1, rank - 2])
    return graph.writer.op("MatMulInteger" if narrow else "MatMul", a, b, *a_zero, *b_zero)


def _convolution(graph: IntegerOnnx, node: Node) -> str:
    weight = node.constants["weight"]
    axes = weight.dim() - 2
    strides, pads, dilations = (
        integers(node, name, default, axes) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    x, zero = graph.unsigned(node.inputs[0])
    product = graph.writer.op(
        "ConvInteger", x, *_interleave(graph.unsigned_weight(weight), zero),
        strides=strides, pads=[*pads, *pads], dilations=dilations, group=integer(node, "groups", 1),
    )  # fmt: skip
    return _with_bias(graph, product, node, [-1] + [1] * axes)


def _interleave(weight: tuple[str, str], zero: str) -> tuple[str, str, str]:
    return weight[0], zero, weight[1]


def _embedding(graph: IntegerOnnx, node: Node) -> str:
    table = node.constants["table"]
    return graph.writer.op(
        "Gather", graph.writer.constant(table, str(table.dtype).removeprefix("torch.")), graph.long(node.inputs[0])
    )


def _positions(graph: IntegerOnnx, node: Node) -> str:
    writer, ids, padding_index = graph.writer, graph.long(node.inputs[0]), integer(node, "padding_index")
    if padding_index < 0:
        visible = writer.op("Expand", writer.constant(1), writer.op("Shape", ids))
        return writer.subtract(writer.op("CumSum", visible, writer.constant(1)), 1)
    visible = writer.select(writer.op("Equal", ids, writer.constant(padding_index)), 0, 1)
    counts = writer.op("CumSum", visible, writer.constant(1))
    return writer.add(writer.multiply(counts, visible), padding_index)


def _add_positions(graph: IntegerOnnx, node: Node) -> str:
    writer, x, table = graph.writer, graph.long(node.inputs[0]), node.constants["table"]
    return writer.add(writer.pad_tokens(x, len(table)), writer.constant(table))


def _relative_bias(graph: IntegerOnnx, node: Node) -> str:
    writer, x, table = graph.writer, graph.long(node.inputs[0]), node.constants["table"]
    queries, keys = (
        writer.op("Range", writer.constant(0), writer.axis_length(x, axis), writer.constant(1)) for axis in (-2, -1)
    )
    distances = writer.subtract(keys, writer.op("Unsqueeze", queries, writer.constant([1])))
    columns = writer.add(distances, table.shape[1] // 2)
    return writer.add(x, writer.op("Gather", writer.constant(table), columns, axis=1))


def _requantize(graph: IntegerOnnx, node: Node) -> str:
    writer, x = graph.writer, graph.long(node.inputs[0])
    axis = integer(node, "axis", -1)
    shift = node.constants["shift"].long()
    multiplier = graph.channels(node.constants["multiplier"].long(), node.inputs[0], axis)
    half = graph.channels((1 << shift) >> 1, node.inputs[0], axis)
    divisor = graph.channels(1 << shift, node.inputs[0], axis)
    scaled = writer.floor_divide(writer.add(writer.multiply(x, multiplier), half), divisor)
    return writer.clip(scaled, integer(node, "minimum"), integer(node, "maximum"))


def _add(graph: IntegerOnnx, node: Node) -> str:
    return graph.writer.add(graph.long(node.inputs[0]), graph.long(node.inputs[1]))


def _gelu(graph: IntegerOnnx, node: Node) -> str:
    writer, x, q_b = graph.writer, graph.long(node.inputs[0]), integer(node, "q_b")
    distance = writer.subtract(q_b, writer.clip(writer.op("Abs", x), None, q_b))
    erf = writer.subtract(integer(node, "q_c"), writer.multiply(distance, distance))
    erf = writer.shift_right(writer.multiply(writer.op("Sign", x), erf), integer(node, "shift"))
    return writer.multiply(x, writer.add(erf, integer(node, "q_one")))


def _multiply(graph: IntegerOnnx, node: Node) -> str:
    return graph.writer.multiply(graph.long(node.inputs[0]), graph.long(node.inputs[1]))


def _silu(graph: IntegerOnnx, node: Node) -> str:
    writer, x = graph.writer, graph.long(node.inputs[0])
    exp = graph.exp(writer.op("Neg", writer.op("Abs", x)), node)
    one = graph.exp(writer.constant(0), node)
    numerator = writer.select(writer.op("Less", x, writer.constant(0)), exp, one)
    sigmoid = writer.divide(writer.multiply(numerator, 1 << integer(node, "bits")), writer.add(exp, one))
    return writer.multiply(x, sigmoid)


def _rope(graph: IntegerOnnx, node: Node) -> str:
    writer = graph.writer
    x, cos, sin = (graph.long(name) for name in node.inputs)
    cos, sin = (writer.op("Unsqueeze", part, writer.constant([2])) for part in (cos, sin))
    half = writer.op("Unsqueeze", writer.axis_length(cos, -1), writer.constant([0]))
    axis = writer.constant([-1])
    first = writer.op("Slice", x, writer.constant([0]), half, axis)
    second = writer.op("Slice", x, half, writer.constant([2**62]), axis)
    rotated = (
        writer.op("Sub", writer.multiply(first, cos), writer.multiply(second, sin)),
        writer.add(writer.multiply(second, cos), writer.multiply(first, sin)),
    )
    return writer.op("Concat", *rotated, axis=-1)


def _causal_mask(graph: IntegerOnnx, node: Node) -> str:
    writer, mask = graph.writer, graph.long(node.inputs[0])
    keys, queries = writer.axis_length(mask, -1), writer.axis_length(node.inputs[1], -1)
    columns, rows = (writer.op("Range", writer.constant(0), length, writer.constant(1)) for length in (keys, queries))
    last_key = writer.op("Unsqueeze", writer.add(rows, writer.subtract(keys, queries)), writer.constant([1]))
    visible = writer.op("LessOrEqual", columns, last_key)
    shown = writer.op("Unsqueeze", writer.op("Not", writer.op("Equal", mask, writer.constant(0))), writer.constant([1]))
    both = writer.cast(writer.op("And", visible, shown), "int64")
    tiled = writer.op("Tile", both, writer.constant([1, integer(node, "repeats"), 1]))
    return writer.op("Unsqueeze", tiled, writer.constant([1]))


def _concat(graph: IntegerOnnx, node: Node) -> str:
    return graph.writer.op("Concat", *node.inputs, axis=integer(node, "axis"))


def _gelu_shift(graph: IntegerOnnx, node: Node) -> str:
    writer, x = graph.writer, graph.long(node.inputs[0])
    scaled = x
    for bits in (1, 3, 4):
        scaled = writer.add(scaled, writer.shift_right(x, bits))
    exp = graph.shift_exp(writer.op("Neg", writer.op("Abs", scaled)), node)
    one = graph.shift_exp(writer.constant(0), node)
    numerator = writer.select(writer.op("Less", scaled, writer.constant(0)), exp, one)
    numerator = writer.multiply(numerator, 1 << integer(node, "sigmoid_bits"))
    return writer.multiply(x, writer.divide(numerator, writer.add(one, exp)))


def _tanh(graph: IntegerOnnx, node: Node) -> str:
    writer, x, levels = graph.writer, graph.long(node.inputs[0]), integer(node, "levels")
    exp = graph.exp(writer.op("Neg", writer.op("Abs", x)), node)
    one = graph.exp(writer.constant(0), node)
    numerator, denominator = writer.subtract(one, exp), writer.add(one, exp)
    rounded = writer.add(writer.multiply(numerator, 2 * levels), denominator)
    return writer.multiply(writer.op("Sign", x), writer.divide(rounded, writer.multiply(denominator, 2)))


def _table(graph: IntegerOnnx, node: Node) -> str:
    return graph.table(graph.long(node.inputs[0]), node)


def _sqrt(graph: IntegerOnnx, node: Node) -> str:
    return graph.square_root(graph.long(node.inputs[0]))


def _softmax(graph: IntegerOnnx, node: Node) -> str:
    writer, x, levels = graph.writer, graph.long(node.inputs[0]), integer(node, "levels")
    bits = integer(node, "reciprocal_bits")
    exp_of = graph.shift_exp if node.op.endswith("_shift") else graph.exp
    exp = _masked_exp(graph, node, x, lambda distance: exp_of(distance, node))
    total = writer.clip(writer.reduce("ReduceSum", exp, -1), 1, None)
    factor = writer.divide(writer.constant(levels << bits), total)
    return writer.round_shift(writer.multiply(exp, factor), bits)


def _softmax_table(graph: IntegerOnnx, node: Node) -> str:
    writer, x, levels = graph.writer, graph.long(node.inputs[0]), integer(node, "levels")

    def exp_of(distance: str) -> str:
        value = graph.table(writer.clip(distance, integer(node, "lowest"), 0), node, "exp_")
        return writer.clip(writer.round_shift(value, integer(node, "exp_shift")), 0, 1 << integer(node, "exp_bits"))

    exp = _masked_exp(graph, node, x, exp_of)
    total = writer.clip(writer.reduce("ReduceSum", exp, -1), 1, None)
    exponent = graph.floor_log2(total)
    mantissa = graph.shifted(total, writer.subtract(RECIPROCAL_INPUT_BITS, exponent))
    factor = writer.multiply(graph.table(mantissa, node, "reciprocal_"), levels)
    result = writer.round_shift(writer.multiply(exp, factor), writer.add(exponent, RESULT_BITS))
    return writer.clip(result, 0, levels)


def _masked_exp(graph: IntegerOnnx, node: Node, x: str, exp: Callable[[str], str]) -> str:
    """Return exp of the distances to the largest visible value, and zero where the mask is zero."""
    writer = graph.writer
    if len(node.inputs) == 1:
        return exp(writer.subtract(x, writer.reduce("ReduceMax", x, -1)))
    hidden = writer.op("Equal", graph.long(node.inputs[1]), writer.constant(0))
    peak = writer.reduce("ReduceMax", writer.select(hidden, -(2**31), x), -1)
    return writer.select(hidden, 0, exp(writer.clip(writer.subtract(x, peak), None, 0)))


def _norm(graph: IntegerOnnx, node: Node) -> str:
    writer, x = graph.writer, graph.long(node.inputs[0])
    bias, shift, output_bits = node.constants.get("bias"), integer(node, "shift"), integer(node, "output_bits")
    if bias is not None:
        length = bias.numel()
        total = writer.add(writer.multiply(writer.reduce("ReduceSum", x, -1), 2), length)
        x = writer.subtract(x, writer.floor_divide(total, 2 * length))
    value = writer.shift_right(x, shift)
    squares = writer.add(writer.reduce("ReduceSum", writer.multiply(value, value), -1), integer(node, "epsilon"))
    if node.op.endswith("_table"):
        squares = writer.clip(squares, 1, None)
        exponent = writer.divide(graph.floor_log2(squares), writer.constant(2))
        mantissa = graph.shifted(squares, writer.subtract(RSQRT_INPUT_BITS, writer.multiply(exponent, 2)))
        bits = writer.add(exponent, RESULT_BITS + shift - output_bits)
        normalized = writer.round_shift(writer.multiply(x, graph.table(mantissa, node)), bits)
    else:
        reciprocal_bits = integer(node, "reciprocal_bits")
        square_root = graph.shift_sqrt if node.op.endswith("_shift") else graph.square_root
        root = writer.clip(writer.multiply(square_root(squares), 1 << shift), 1, None)
        factor = writer.divide(writer.constant(1 << reciprocal_bits), root)
        normalized = writer.round_shift(writer.multiply(x, factor), reciprocal_bits - output_bits)
    scaled = writer.multiply(normalized, writer.constant(node.constants["weight"]))
    return scaled if bias is None else writer.add(scaled, writer.constant(bias))


def _mean(graph: IntegerOnnx, node: Node) -> str:
    return graph.writer.reduce("ReduceSum", graph.long(node.inputs[0]), integer(node, "axis"), keep=False)


def _masked_mean(graph: IntegerOnnx, node: Node) -> str:
    writer, x = graph.writer, graph.long(node.inputs[0])
    hidden = writer.op("Equal", graph.long(node.inputs[1]), writer.constant(0))
    visible = writer.op("Unsqueeze", writer.select(hidden, 0, 1), writer.constant([-1]))
    count = writer.clip(writer.reduce("ReduceSum", visible, 1, keep=False), 1, None)
    total = writer.reduce("ReduceSum", writer.multiply(x, visible), 1, keep=False)
    return writer.floor_divide(writer.add(writer.multiply(total, 2), count), writer.multiply(count, 2))


def _pool(graph: IntegerOnnx, node: Node) -> str:
    """Combine one strided slice per position of the window: ONNX pools only 8-bit and floating point values."""
    writer, x = graph.writer, graph.long(node.inputs[0])
    kernel, stride = (integers(node, name, 1, 1) for name in ("kernel", "stride"))
    axes = list(range(-len(kernel), 0))
    result = ""
    for position in np.ndindex(*kernel):
        # A negative end leaves as many positions as the first window has; the last one may not reach the border.
        ends = [offset - size + 1 for offset, size in zip(position, kernel, strict=True)]
        piece = writer.op(
            "Slice", x, writer.constant(list(position)), writer.constant([end or 2**62 for end in ends]),
            writer.constant(axes), writer.constant(stride),
        )  # fmt: skip
        combine = writer.add if node.op == "avg_pool" else writer.maximum
        result = piece if not result else combine(result, piece)
    return result


def _argmax(graph: IntegerOnnx, node: Node) -> str:
    writer, x, axis = graph.writer, graph.long(node.inputs[0]), integer(node, "axis", -1)
    axis %= graph.ranks[node.inputs[0]]
    size = writer.axis_length(x, axis)
    positions = writer.op("Range", writer.constant(0), size, writer.constant(1))
    following = graph.ranks[node.inputs[0]] - axis - 1
    if following:
        positions = writer.op("Unsqueeze", positions, writer.constant(list(range(1, following + 1))))
    peak = writer.op("Equal", x, writer.reduce("ReduceMax", x, axis))
    return writer.reduce("ReduceMin", writer.select(peak, positions, size), axis, keep=False)


def _reshape(graph: IntegerOnnx, node: Node) -> str:
    return graph.writer.op("Reshape", node.inputs[0], graph.writer.constant(integers(node, "shape", 0, 1)))


def _permute(graph: IntegerOnnx, node: Node) -> str:
    return graph.writer.op("Transpose", node.inputs[0], perm=integers(node, "axes", 0, 1))


def _slice(graph: IntegerOnnx, node: Node) -> str:
    start, stop, axis = (integer(node, name) for name in ("start", "stop", "axis"))
    end = 2**62 if start < 0 and stop == 0 else stop
    return graph.writer.op("Slice", node.inputs[0], *(graph.writer.constant([value]) for value in (start, end, axis)))


_OPERATORS: dict[str, Callable[[IntegerOnnx, Node], str]] = {
    "linear": _linear, "matmul": _matmul, "conv1d": _convolution, "conv2d": _convolution, "embedding": _embedding,
    "positions": _positions, "add_positions": _add_positions, "relative_bias": _relative_bias,
    "requantize": _requantize, "add": _add, "gelu": _gelu, "gelu_shift": _gelu_shift, "tanh": _tanh, "table": _table,
    "sqrt": _sqrt, "softmax": _softmax, "softmax_table": _softmax_table, "softmax_shift": _softmax,
    "layer_norm": _norm, "rms_norm": _norm, "layer_norm_table": _norm, "rms_norm_table": _norm,
    "layer_norm_shift": _norm, "mean": _mean, "masked_mean": _masked_mean, "avg_pool": _pool, "max_pool": _pool,
    "argmax": _argmax, "reshape": _reshape, "permute": _permute, "slice": _slice, "concat": _concat,
    "causal_mask": _causal_mask, "rope": _rope, "multiply": _multiply, "silu": _silu,
}  # fmt: skip
