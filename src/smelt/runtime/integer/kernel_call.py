"""A call of a kernel in a fused program, and the call of the reference for a node that has no kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.kernels.integer_interface import IntegerKernels, PackedWeight, Requantize, Steps
from smelt.runtime.integer.graph import DTYPES, Node
from smelt.runtime.integer.ops import OPERATORS


class KernelCall(ABC):
    """One call of a kernel: the tensors it reads and those it defines."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @abstractmethod
    def run(self, kernels: IntegerKernels, *inputs: Tensor) -> Sequence[Tensor]:
        """Return the outputs."""


@dataclass
class ReferenceCall(KernelCall):
    """A node without a kernel."""

    node: Node

    def __post_init__(self) -> None:
        self.inputs, self.outputs = self.node.inputs, (self.node.output,)

    def run(self, kernels: IntegerKernels, *inputs: Tensor) -> Sequence[Tensor]:
        node = self.node
        return [OPERATORS[node.op](*inputs, **node.constants, **node.attributes).to(DTYPES[node.dtype])]


@dataclass
class LinearCall(KernelCall):
    """A linear layer, or several that were joined, and the steps that follow."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weight: PackedWeight
    bias: Tensor | None
    steps: Steps
    dtype: torch.dtype
    sizes: tuple[int, ...] = ()  # channels of every layer, if there are several

    def run(self, kernels: IntegerKernels, *inputs: Tensor) -> Sequence[Tensor]:
        result = kernels.linear(inputs[0], self.weight, self.bias, self.steps, self.dtype)
        return [result] if len(self.outputs) == 1 else result.split(self.sizes, -1)


def join_linear(calls: Sequence[KernelCall], kernels: IntegerKernels) -> list[KernelCall]:
    """Let linear layers with the same input (query, key and value) be one call, where the first of them was."""
    groups: dict[object, list[LinearCall]] = defaultdict(list)
    for call in calls:
        if isinstance(call, LinearCall) and (key := _joint_key(call)) is not None:
            groups[key].append(call)
    replaced: dict[int, list[KernelCall]] = {}
    for group in groups.values():
        weight = kernels.join([call.weight for call in group]) if len(group) > 1 else None
        if weight is not None:
            replaced |= {id(call): [] for call in group}
            replaced[id(group[0])] = [_joined(group, weight)]
    return [new for call in calls for new in replaced.get(id(call), [call])]


def _joint_key(call: LinearCall) -> object | None:
    """Return what layers of one call have in common; None if more than one requantization follows the layer."""
    if len(call.steps.steps) != 1:
        return None
    step = call.steps.steps[0]
    if not isinstance(step, Requantize):
        return None
    return (*call.inputs, call.dtype, call.weight.is_unsigned, call.bias is None, step.minimum, step.maximum)


def _joined(group: Sequence[LinearCall], weight: PackedWeight) -> LinearCall:
    sizes = tuple(call.weight.channels for call in group)
    biases = [call.bias for call in group if call.bias is not None]
    requantize = [call.steps.steps[0] for call in group]
    first = requantize[0]
    assert isinstance(first, Requantize)
    multiplier, shift = (
        torch.cat([getattr(step, name).flatten().expand(size) for step, size in zip(requantize, sizes, strict=True)])
        for name in ("multiplier", "shift")
    )
    return LinearCall(
        group[0].inputs, tuple(name for call in group for name in call.outputs), weight,
        torch.cat(biases) if biases else None,
        Steps((Requantize(multiplier, shift, first.minimum, first.maximum),)), group[0].dtype, sizes,
    )  # fmt: skip
