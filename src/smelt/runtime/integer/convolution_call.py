"""A convolution of an integer graph as one call of a kernel, with the residual sum and requantizations that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.conv import ConvShape
from smelt.kernels.integer_interface import IntegerKernels, PackedWeight, Steps
from smelt.runtime.integer.graph import DTYPES, Node
from smelt.runtime.integer.kernel_call import KernelCall
from smelt.runtime.integer.ops import OPERATORS


@dataclass
class ConvolutionCall(KernelCall):
    """A convolution and the steps that follow; the memory of its result has the channels last."""

    inputs: tuple[str, ...]  # of the convolution, then the operands of its sums
    outputs: tuple[str, ...]
    weight: PackedWeight
    shape: ConvShape
    bias: Tensor | None
    steps: Steps
    dtype: torch.dtype
    nodes: list[Node]  # what the call computes

    def run(self, kernels: IntegerKernels, *inputs: Tensor) -> Sequence[Tensor]:
        x, *operands = inputs
        if operands:
            height, width = x.shape[2:] if x.dim() == 4 else (1, x.shape[2])
            sizes = self.shape.output_size(height, width)[4 - x.dim() :]
            expected = (len(x), self.shape.out_channels, *sizes)
            if any(operand.shape != expected for operand in operands):  # a sum with broadcasting
                return [self._by_reference(inputs)]
        return [kernels.convolve(x, self.weight, self.shape, self.bias, self.steps, self.dtype, operands)]

    def _by_reference(self, inputs: Sequence[Tensor]) -> Tensor:
        values = dict(zip(self.inputs, inputs, strict=True))
        for node in self.nodes:
            result = OPERATORS[node.op](*(values[name] for name in node.inputs), **node.constants, **node.attributes)
            values[node.output] = result.to(DTYPES[node.dtype])
        return values[self.outputs[0]]


def convolution_shape(node: Node) -> ConvShape:
    """Return the shape of a node `conv1d` or `conv2d`."""
    weight, attributes = node.constants["weight"], node.attributes
    groups: Any = attributes.get("groups", 1)
    outputs, inputs, *kernel = weight.shape

    def pair(name: str, default: int) -> tuple[int, int]:
        value = attributes.get(name, default)
        sizes = value if isinstance(value, list) else [value] * len(kernel)
        return (default, sizes[0]) if len(kernel) == 1 else (sizes[0], sizes[1])

    top, left = pair("padding", 0)
    return ConvShape(
        inputs * groups, outputs, (1, kernel[0]) if len(kernel) == 1 else (kernel[0], kernel[1]), pair("stride", 1),
        ((top, top), (left, left)), pair("dilation", 1), groups, len(kernel),
    )  # fmt: skip
