"""Run an integer graph: node by node by the reference, or with the fused kernels of a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from smelt.errors import ModelError
from smelt.kernels.integer import integer_kernels
from smelt.kernels.integer_interface import IntegerKernels
from smelt.runtime.integer.fused import FusedProgram
from smelt.runtime.integer.graph import DTYPES, IntegerGraph, Node, dtype_name
from smelt.runtime.integer.ops import OPERATORS

# An operator that a backend lacks runs by the reference.
BACKENDS: dict[str, dict[str, Callable[..., Tensor]]] = {"reference": OPERATORS}
FUSED_BACKENDS = {"cpu": "cpu", "gpu": "cuda"}  # device of the kernels


class Interpreter:
    """Executes a graph; `check_ranges` also proves that no result leaves the range of its dtype.

    With a fused backend, `run` calls kernels, and only `trace` goes through the nodes, by the reference.
    """

    def __init__(self, graph: IntegerGraph, backend: str = "reference", *, check_ranges: bool = False) -> None:
        names = (*BACKENDS, *FUSED_BACKENDS)
        if backend not in names:
            raise ModelError(f"There is no backend {backend!r} for integer graphs; choose from {', '.join(names)}.")
        if unknown := {node.op for node in graph.nodes} - OPERATORS.keys():
            raise ModelError(f"The integer graph has unknown operators: {', '.join(sorted(unknown))}.")
        self.graph = graph
        self.check_ranges = check_ranges
        self._kernels = _kernels(backend) if backend in FUSED_BACKENDS else None
        functions = BACKENDS.get(backend, OPERATORS)
        self.functions = [functions.get(node.op, OPERATORS[node.op]) for node in graph.nodes]
        self._released = _last_uses(graph)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name; all values are integers."""
        if self._kernels is not None:
            return self.program.run({name: self._input(name, inputs) for name in self.graph.inputs})
        outputs = {name: tensor for name, tensor in inputs.items() if name in self.graph.outputs}
        for node, tensor in self.trace(inputs):
            if node.output in self.graph.outputs:
                outputs[node.output] = tensor
        return outputs

    @cached_property
    def program(self) -> FusedProgram:
        """The graph as calls of kernels; weights are packed on first use."""
        assert self._kernels is not None
        return FusedProgram(self.graph, self._kernels)

    def trace(self, inputs: Mapping[str, Tensor]) -> Iterator[tuple[Node, Tensor]]:
        """Yield every node with the tensor it produces, in order; a tensor is released after its last use."""
        values = {name: self._input(name, inputs) for name in self.graph.inputs}
        for index, (node, function) in enumerate(zip(self.graph.nodes, self.functions, strict=True)):
            arguments = [values[name] for name in node.inputs]
            values[node.output] = self._result(node, function(*arguments, **node.constants, **node.attributes))
            yield node, values[node.output]
            for name in self._released[index]:
                del values[name]

    def _input(self, name: str, inputs: Mapping[str, Tensor]) -> Tensor:
        if name not in inputs:
            raise ModelError(f"The integer graph needs the input {name!r}.")
        tensor = inputs[name]
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            raise ModelError(f"The integer graph takes integers; the input {name!r} is {dtype_name(tensor)}.")
        return tensor.to(DTYPES[self.graph.inputs[name]])

    def _result(self, node: Node, result: Tensor) -> Tensor:
        dtype = DTYPES[node.dtype]
        if result.dtype not in DTYPES.values():
            raise ModelError(f"The integer graph computed {dtype_name(result)} in {node}; only integers are allowed.")
        if self.check_ranges and result.numel():
            limits = torch.iinfo(dtype)
            if int(result.min()) < limits.min or int(result.max()) > limits.max:
                raise ModelError(f"The integer graph overflows {node.dtype} in {node}.")
        return result.to(dtype)


def preferred_backend(device: torch.device) -> str:
    """Return the fastest backend on a device."""
    names = (name for name, kind in FUSED_BACKENDS.items() if kind == device.type and integer_kernels(kind) is not None)
    return next(names, "reference")


def _kernels(backend: str) -> IntegerKernels:
    kernels = integer_kernels(FUSED_BACKENDS[backend])
    if kernels is None:
        needed = "a C++ compiler" if backend == "cpu" else "a CUDA device and Triton"
        raise ModelError(f"The backend {backend!r} for integer graphs needs {needed}; use the reference.")
    return kernels


def add_default_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add what a batch of tokens or spectrograms lacks: a mask that hides nothing, token types of zero."""
    tokens, features = inputs.get("input_ids"), inputs.get("input_features")
    if tokens is not None:
        return {"attention_mask": torch.ones_like(tokens), "token_type_ids": torch.zeros_like(tokens), **inputs}
    if features is not None:
        frames = torch.ones(len(features), features.shape[-1], dtype=torch.int8, device=features.device)
        return {"attention_mask": frames, **inputs}
    return dict(inputs)


def _last_uses(graph: IntegerGraph) -> list[list[str]]:
    """Return for every node the tensors that nothing after it reads."""
    uses = Counter(name for node in graph.nodes for name in set(node.inputs))
    uses.update(graph.outputs)
    released = []
    for node in graph.nodes:
        done = [] if uses[node.output] else [node.output]
        for name in set(node.inputs):
            uses[name] -= 1
            if not uses[name]:
                done.append(name)
        released.append(done)
    return released
