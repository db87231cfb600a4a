"""Append ONNX nodes and constants, with arithmetic on int64 that rounds as the reference of integer graphs does."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

OPSET = 20


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
