"""A call of a kernel in a fused program, and the call of the reference for a node that has no kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from smelt.kernels.integer_interface import IntegerKernels
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
