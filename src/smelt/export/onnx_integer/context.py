"""What the operators of an integer ONNX graph share: tensors of the graph, and functions that several operators use."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from smelt.errors import FormatError
from smelt.export.attributes import integer
from smelt.export.onnx_integer.writer import GraphWriter
from smelt.runtime.integer.graph import IntegerGraph, Node
from smelt.runtime.integer.shift_ops import SQRT_ITERATIONS

_NEWTON_STEPS = 8  # quadratic convergence from less than twice the root: 2^31 needs 6
_EXP_NAMES = ("q_ln2", "q_b", "q_c", "max_halvings", "lift", "drop")
_SHIFT_EXP_NAMES = ("q_one", "max_halvings", "lift", "drop")


class OperatorContext:
    """What operators read and append to: `ranks` has the number of axes of all tensors, `dtypes` those so far."""

    def __init__(self, graph: IntegerGraph, ranks: Mapping[str, int]) -> None:
        self.ranks = ranks
        self.dtypes = dict(graph.inputs)
        self.writer = GraphWriter()

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
