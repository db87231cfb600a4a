"""Run an integer graph with fused kernels: a product, its requantization and its activation are one pass over memory.

Nodes are grouped once. Elementwise nodes that follow a product or a norm become steps of its kernel, a residual sum
becomes part of the norm that reads it, and the two products of attention and the softmax between them are one kernel.
What has no kernel runs by the reference, and every result has its bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.integer_interface import (
    INT_TYPES,
    Add,
    Gelu,
    IntegerKernels,
    NormConstants,
    Requantize,
    SoftmaxConstants,
    Step,
    Steps,
    TableLookup,
    Tanh,
)
from smelt.runtime.integer.convolution_call import ConvolutionCall, convolution_shape
from smelt.runtime.integer.graph import DTYPES, IntegerGraph, Node
from smelt.runtime.integer.kernel_call import KernelCall, LinearCall, ReferenceCall, join_linear

_MAX_NORM_OUTPUTS = 2


@dataclass
class MatmulCall(KernelCall):
    """A batched product of two activations and the steps that follow."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    transpose_b: bool
    steps: Steps
    dtype: torch.dtype

    def run(self, kernels: IntegerKernels, *inputs: Tensor) -> Sequence[Tensor]:
        a, b = inputs
        shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (_four_axes(tensor.expand(*shape, *tensor.shape[-2:])) for tensor in (a, b))
        out = kernels.matmul(a, b, self.transpose_b, self.steps, self.dtype)
        return [out.reshape(*shape, *out.shape[-2:])]


@dataclass
class AttentionCall(KernelCall):
    """softmax(query key^T) value: two products, the softmax between them, and the steps of scores and result."""

    inputs: tuple[str, ...]  # query, key, value and, if there is one, the mask
    outputs: tuple[str, ...]
    score_steps: Steps
    softmax: SoftmaxConstants
    steps: Steps
    dtype: torch.dtype

    def run(self, kernels: IntegerKernels, *inputs: Tensor) -> Sequence[Tensor]:
        query, key, value, *mask = inputs
        return [
            kernels.attention(
                query, key, value, mask[0] if mask else None, self.score_steps, self.softmax, self.steps, self.dtype
            )
        ]


@dataclass
class SoftmaxCall(KernelCall):
    """The steps before a softmax, and the softmax."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: Steps
    softmax: SoftmaxConstants
    dtype: torch.dtype

    def run(self, kernels: IntegerKernels, *inputs: Tensor) -> Sequence[Tensor]:
        x, *mask = inputs
        return [kernels.softmax(x, mask[0] if mask else None, self.steps, self.softmax, self.dtype)]


@dataclass
class NormCall(KernelCall):
    """The residual sum before a LayerNorm or RMSNorm, the norm, and the requantization of its results."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: Steps
    norm: NormConstants
    results: list[tuple[Steps, torch.dtype]]

    def run(self, kernels: IntegerKernels, *inputs: Tensor) -> Sequence[Tensor]:
        x, operands = _broadcast(inputs)
        return kernels.norm(x, self.steps, self.norm, self.results, operands)


@dataclass
class MapCall(KernelCall):
    """Elementwise steps."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: Steps
    dtype: torch.dtype

    def run(self, kernels: IntegerKernels, *inputs: Tensor) -> Sequence[Tensor]:
        x, operands = _broadcast(inputs)
        return [kernels.map(x, self.steps, self.dtype, operands)]


@dataclass
class PaddingCheck(KernelCall):
    """Whether a mask of ones and zeros hides anything: the mask, or a tensor without elements if it does not."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, kernels: IntegerKernels, *inputs: Tensor) -> Sequence[Tensor]:
        (mask,) = inputs
        return [mask[:0] if not mask.is_cuda and bool((mask == 1).all()) else mask]


@dataclass
class MaskCall(KernelCall):
    """A product of 8-bit values with a mask of ones and zeros; where it hides nothing, the values stay as they are."""

    inputs: tuple[str, ...]  # the values, the mask, and what its check returned
    outputs: tuple[str, ...]

    def run(self, kernels: IntegerKernels, *inputs: Tensor) -> Sequence[Tensor]:
        x, mask, padding = inputs
        is_repeated = mask.dim() != x.dim() or any(
            own not in (1, n) for own, n in zip(mask.shape, x.shape, strict=True)
        )
        if not padding.numel() and not is_repeated:
            return [x]
        return [x * mask.to(x.dtype)]  # modulo 2^8, as the cast of a wider product


class FusedProgram:
    """An integer graph as calls of kernels, in order."""

    def __init__(self, graph: IntegerGraph, kernels: IntegerKernels) -> None:
        self.kernels, self.graph_outputs = kernels, tuple(graph.outputs)
        self.calls = _Planner(graph, kernels).plan()
        self._released = self._last_uses()

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of the graph by name."""
        values = dict(inputs)
        for call, released in zip(self.calls, self._released, strict=True):
            results = call.run(self.kernels, *(values[name] for name in call.inputs))
            values.update(zip(call.outputs, results, strict=True))
            for name in released:
                del values[name]
        return {name: values[name] for name in self.graph_outputs}

    def _last_uses(self) -> list[list[str]]:
        seen, released = set(self.graph_outputs), []
        for call in reversed(self.calls):
            names = {*call.inputs, *call.outputs}
            released.append(sorted(names - seen))
            seen |= names
        return released[::-1]


class _Planner:
    """Groups the nodes of a graph. A group runs at the position of one of its nodes, where all it reads is defined."""

    def __init__(self, graph: IntegerGraph, kernels: IntegerKernels) -> None:
        self.graph, self.kernels = graph, kernels
        self.producers = {node.output: node for node in graph.nodes}
        self.dtypes = {**graph.inputs, **{node.output: node.dtype for node in graph.nodes}}
        self.consumers: dict[str, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            for name in node.inputs:
                self.consumers[name].append(node)
        self.fused: set[str] = set()  # outputs of nodes that are part of another node's call

    def plan(self) -> list[KernelCall]:
        calls: dict[str, KernelCall] = {}
        for node in self.graph.nodes:
            if node.op == "matmul" and (attention := self._attention(node)) is not None:
                calls[attention[0]] = attention[1]
        for node in reversed(self.graph.nodes):
            if node.op in ("conv1d", "conv2d") and (convolution := self._convolution(node)) is not None:
                calls[convolution.outputs[0]] = convolution
        for build in (self._product, self._norm, self._softmax, self._map, self._mask):
            for node in reversed(self.graph.nodes):  # a chain is entered at its end
                if node.output not in calls and node.output not in self.fused and (call := build(node)) is not None:
                    calls[node.output] = call
        ordered = [
            calls.get(node.output) or ReferenceCall(node)
            for node in self.graph.nodes
            if node.output in calls or node.output not in self.fused
        ]
        return _with_checks(join_linear(ordered, self.kernels))

    def _product(self, node: Node) -> KernelCall | None:
        is_unsigned = self.dtypes[node.inputs[0]] == "uint8" and self.kernels.has_convolutions
        if node.op == "linear" and (is_unsigned or self.dtypes[node.inputs[0]] == "int8"):
            end, steps = self._steps_after(node)
            weight, bias = self.kernels.pack(node.constants["weight"], is_unsigned), node.constants.get("bias")
            return LinearCall(node.inputs, (end.output,), weight, bias, Steps(steps), DTYPES[end.dtype])
        if node.op == "matmul" and all(self.dtypes[name] == "int8" for name in node.inputs):
            end, steps = self._steps_after(node, per_tensor=True)
            transpose_b = bool(node.attributes.get("transpose_b", 0))
            return MatmulCall(node.inputs, (end.output,), transpose_b, Steps(steps), DTYPES[end.dtype])
        return None

    def _convolution(self, node: Node) -> KernelCall | None:
        """Return the call of a convolution and of the residual sum and requantizations that follow."""
        if not self.kernels.has_convolutions or node.dtype != "int32":
            return None
        if self.dtypes[node.inputs[0]] not in ("int8", "uint8") or node.constants["weight"].dtype != torch.int8:
            return None
        nodes: list[Node] = [node]
        steps: list[Step] = []
        operands: list[str] = []
        while (follower := self._only_consumer(nodes[-1], None)) is not None:
            step = self._step(follower, channel_axis=1)
            if follower.op == "add" and follower.dtype == "int32":
                first, second = follower.inputs
                other = second if first == nodes[-1].output else first
                if self.dtypes[other] not in _FUSED_DTYPES:
                    break
                operand, step = self._operand(other, channel_axis=1)
                if operand != other:
                    nodes.append(self.producers[other])
                operands.append(operand)
            if step is None:
                break
            nodes.append(follower)
            steps.append(step)
        self.fused |= {each.output for each in nodes}
        shape, is_unsigned = convolution_shape(node), self.dtypes[node.inputs[0]] == "uint8"
        weight = self.kernels.pack_convolution(node.constants["weight"], shape, is_unsigned)
        return ConvolutionCall(
            (*node.inputs, *operands), (nodes[-1].output,), weight, shape, node.constants.get("bias"),
            Steps(tuple(steps)), DTYPES[nodes[-1].dtype], nodes,
        )  # fmt: skip

    def _attention(self, node: Node) -> tuple[str, KernelCall] | None:
        """Return the name of the second product of attention and its call, if `node` is the first."""
        if not node.attributes.get("transpose_b") or any(self.dtypes[name] != "int8" for name in node.inputs):
            return None
        before = set(self.fused)
        end, score_steps = self._steps_after(node, per_tensor=True)
        softmax = self._only_consumer(end, "softmax")
        product = None if softmax is None or softmax.dtype != "int8" else self._only_consumer(softmax, "matmul")
        if product is None or softmax is None or softmax.inputs[0] != end.output or product.inputs[0] != softmax.output:
            self.fused = before
            return None
        if product.attributes.get("transpose_b") or self.dtypes[product.inputs[1]] != "int8":
            self.fused = before
            return None
        self.fused |= {node.output, softmax.output}
        last, steps = self._steps_after(product, per_tensor=True)
        inputs = (*node.inputs, product.inputs[1], *softmax.inputs[1:])
        return product.output, AttentionCall(
            inputs, (last.output,), Steps(score_steps), _softmax_constants(softmax), Steps(steps), DTYPES[last.dtype]
        )

    def _softmax(self, node: Node) -> KernelCall | None:
        if node.op != "softmax" or self.dtypes[node.inputs[0]] not in _FUSED_DTYPES or node.dtype not in _FUSED_DTYPES:
            return None
        inputs, dtype = node.inputs, DTYPES[node.dtype]
        return SoftmaxCall(inputs, (node.output,), Steps(), _softmax_constants(node), dtype)

    def _norm(self, node: Node) -> KernelCall | None:
        if node.op not in ("layer_norm", "rms_norm") or node.dtype != "int32":
            return None
        if self.dtypes[node.inputs[0]] not in _FUSED_DTYPES:
            return None
        source, steps, operands = self._steps_before(node.inputs[0])
        attributes: dict[str, Any] = node.attributes
        constants = NormConstants(node.constants["weight"], node.constants.get("bias"), **attributes)
        outputs, results = self._norm_results(node)
        return NormCall((source, *operands), tuple(outputs), Steps(tuple(steps)), constants, results)

    def _norm_results(self, node: Node) -> tuple[list[str], list[tuple[Steps, torch.dtype]]]:
        """Return names and steps of the results: as many requantized ones as the kernel can write, else int32."""
        requantized = [
            consumer
            for consumer in self.consumers[node.output]
            if consumer.op == "requantize" and consumer.output not in self.fused and self._step(consumer) is not None
        ]
        needs_int32 = node.output in self.graph.outputs or len(requantized) < len(self.consumers[node.output])
        if len(requantized) + needs_int32 > _MAX_NORM_OUTPUTS:
            requantized, needs_int32 = requantized[:1], True
        names: list[str] = []
        results: list[tuple[Steps, torch.dtype]] = []
        for consumer in requantized:
            step = self._step(consumer)
            assert step is not None
            self.fused.add(consumer.output)
            names.append(consumer.output)
            results.append((Steps((step,)), DTYPES[consumer.dtype]))
        if needs_int32:
            names.append(node.output)
            results.append((Steps(), torch.int32))
        return names, results

    def _map(self, node: Node) -> KernelCall | None:
        if not self._is_elementwise(node):
            return None
        source, steps, operands = self._steps_of(node)
        return MapCall((source, *operands), (node.output,), Steps(tuple(steps)), DTYPES[node.dtype])

    def _mask(self, node: Node) -> KernelCall | None:
        dtypes = [self.dtypes[name] for name in node.inputs]
        if node.op != "multiply" or dtypes[0] != node.dtype or not {"int8", "uint8"}.issuperset(dtypes):
            return None
        return MaskCall((*node.inputs, f"padding of {node.inputs[1]}"), (node.output,))

    def _steps_after(self, node: Node, per_tensor: bool = False) -> tuple[Node, tuple[Step, ...]]:
        """Return the last of the elementwise nodes that only follow `node`, and their steps; mark them as fused."""
        steps: list[Step] = []
        while True:
            follower = self._only_consumer(node, None)
            step = None if follower is None else self._step(follower)
            if follower is None or step is None:
                return node, tuple(steps)
            if per_tensor and isinstance(step, Requantize) and step.multiplier.numel() > 1:
                return node, tuple(steps)
            node = follower
            self.fused.add(node.output)
            steps.append(step)

    def _steps_before(self, name: str) -> tuple[str, list[Step], list[str]]:
        """Return where the elementwise nodes that end with `name` begin, their steps, and the operands they add."""
        node = self.producers.get(name)
        if node is None or not self._is_private(name) or not self._is_elementwise(node):
            return name, [], []
        self.fused.add(name)
        return self._steps_of(node)

    def _steps_of(self, node: Node) -> tuple[str, list[Step], list[str]]:
        """Return the steps up to an elementwise node, itself included."""
        if node.op != "add":
            step = self._step(node)
            assert step is not None
            source, steps, operands = self._steps_before(node.inputs[0])
            return source, [*steps, step], operands
        left, right = node.inputs
        source, steps, operands = self._steps_before(left)
        operand, step = self._operand(right)
        return source, [*steps, step], [*operands, operand]

    def _operand(self, name: str, channel_axis: int = -1) -> tuple[str, Add]:
        """Return the tensor that an addition reads, before its requantization if nothing else reads it."""
        node = self.producers.get(name)
        step = self._step(node, channel_axis) if node is not None and self._is_private(name) else None
        if node is None or not isinstance(step, Requantize):
            return name, Add()
        self.fused.add(name)
        return node.inputs[0], Add(step)

    def _is_private(self, name: str) -> bool:
        """Return whether one node alone reads a tensor, and no call of another node writes it."""
        return len(self.consumers[name]) == 1 and name not in self.graph.outputs and name not in self.fused

    def _is_elementwise(self, node: Node) -> bool:
        dtypes = (node.dtype, *(self.dtypes[name] for name in node.inputs))
        return _FUSED_DTYPES.issuperset(dtypes) and (node.op == "add" or self._step(node) is not None)

    def _step(self, node: Node, channel_axis: int = -1) -> Step | None:
        """Return the step that an elementwise node is, for a kernel whose channels are along an axis."""
        if len(node.inputs) != 1 or self.dtypes[node.inputs[0]] not in _FUSED_DTYPES or node.dtype not in _FUSED_DTYPES:
            return None
        attributes: dict[str, Any] = dict(node.attributes)
        constants: dict[str, Any] = node.constants
        if node.op == "requantize":
            axis = attributes.pop("axis", -1)
            per_tensor = constants["multiplier"].numel() == constants["shift"].numel() == 1
            return Requantize(**constants, **attributes) if per_tensor or axis == channel_axis else None
        if node.op == "gelu":
            return Gelu(**attributes)
        if node.op == "table":
            return TableLookup(**constants)
        if node.op == "tanh" and self.kernels.has_tanh:
            return Tanh(**attributes)
        return None

    def _only_consumer(self, node: Node, op: str | None) -> Node | None:
        consumers = self.consumers[node.output]
        if len(consumers) != 1 or node.output in self.graph.outputs or consumers[0].output in self.fused:
            return None
        return consumers[0] if op in (None, consumers[0].op) else None


_FUSED_DTYPES = frozenset(name for name, dtype in DTYPES.items() if dtype in INT_TYPES)


def _with_checks(calls: Iterable[KernelCall]) -> list[KernelCall]:
    """Check each mask once, before the first product with it."""
    checked: set[str] = set()
    result: list[KernelCall] = []
    for call in calls:
        if isinstance(call, MaskCall) and call.inputs[2] not in checked:
            checked.add(call.inputs[2])
            result.append(PaddingCheck(call.inputs[1:2], call.inputs[2:]))
        result.append(call)
    return result


def _softmax_constants(node: Node) -> SoftmaxConstants:
    attributes: dict[str, Any] = node.attributes
    return SoftmaxConstants(**attributes)


def _four_axes(x: Tensor) -> Tensor:
    """Return a batch of matrices as [outer, inner, rows, columns]."""
    if x.dim() == 4:
        return x
    return x.reshape(-1, 1, *x.shape[-2:])


def _broadcast(inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return x with the shape of the result, and operands that have that shape or its last axes."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in inputs))
    x, *operands = inputs
    repeated = [
        operand if operand.shape == shape[len(shape) - operand.dim() :] else operand.expand(shape)
        for operand in operands
    ]
    return x.expand(shape), repeated
