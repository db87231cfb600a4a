"""Build an integer graph from float layers: quantize weights, track scale and bound of every tensor, refuse overflows.

Scales and bounds exist here only. A bound is the largest magnitude that a tensor can have for any input, so that an
accumulator or product that could overflow is an error of the conversion, with the name of its layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smelt.errors import ConversionError
from smelt.runtime.integer.constants import (
    INT32_MAX,
    gelu_constants,
    norm_constants,
    silu_constants,
    softmax_constants,
    tanh_constants,
)
from smelt.runtime.integer.dyadic import dyadic_tensors
from smelt.runtime.integer.graph import DTYPES, Attribute, IntegerGraph, Node

SCORE_SCALE = math.log(2) / 1024  # of attention scores: ln 2 is a power of two, and exp loses less than 1e-5


@dataclass(frozen=True)
class QTensor:
    """A tensor of a graph under construction: `scale` is a float64 tensor [1] or [channels], along the last axis."""

    name: str
    scale: Tensor
    bound: int  # of the magnitude

    @property
    def per_tensor_scale(self) -> float:
        """The one scale of the tensor."""
        if self.scale.numel() != 1:
            raise ValueError(f"{self.name} has one scale per channel")
        return float(self.scale)


class GraphBuilder:
    """Appends nodes to a graph; `finish` returns it."""

    def __init__(self, inputs: Mapping[str, str]) -> None:
        self.graph = IntegerGraph(inputs=dict(inputs))
        self._names = Counter(inputs)

    def input(self, name: str, scale: float = 1.0, bound: int = INT32_MAX) -> QTensor:
        """Return an input of the graph."""
        return QTensor(name, _scale(scale), bound)

    def node(
        self, op: str, inputs: Sequence[QTensor], layer: str, *, dtype: str, scale: Tensor | float, bound: int,
        attributes: Mapping[str, Attribute] | None = None, constants: Mapping[str, Tensor] | None = None,
    ) -> QTensor:  # fmt: skip
        """Append a node; raise if its values could leave the range of its dtype."""
        if bound > torch.iinfo(DTYPES[dtype]).max:
            raise ConversionError(
                f"{layer}: the result of {op} can reach {bound}, which overflows {dtype}; check the layer's weights "
                "and calibration data for extreme values."
            )
        name = f"{layer}.{op}"
        self._names[name] += 1
        name = name if self._names[name] == 1 else f"{name}_{self._names[name]}"
        names = tuple(tensor.name for tensor in inputs)
        self.graph.nodes.append(Node(op, names, name, dtype, dict(attributes or {}), dict(constants or {}), layer))
        result = QTensor(name, _scale(scale), bound)
        self.graph.scales[name] = float(result.scale) if result.scale.numel() == 1 else result.scale.tolist()
        return result

    def rescale(self, x: QTensor, scale: Tensor | float) -> QTensor:
        """Return the same integers with another scale, for which a factor elsewhere must account."""
        result = replace(x, scale=_scale(scale))
        self.graph.scales[x.name] = float(result.scale) if result.scale.numel() == 1 else result.scale.tolist()
        return result

    def finish(self, outputs: Mapping[str, QTensor]) -> IntegerGraph:
        """Name the outputs and return the checked graph."""
        renamed = {tensor.name: name for name, tensor in outputs.items()}
        nodes = self.graph.nodes
        for index, node in enumerate(nodes):
            inputs = tuple(renamed.get(name, name) for name in node.inputs)
            nodes[index] = replace(node, inputs=inputs, output=renamed.get(node.output, node.output))
        self.graph.scales = {renamed.get(name, name): scale for name, scale in self.graph.scales.items()}
        self.graph.outputs = list(outputs)
        self.graph.check()
        return self.graph

    # --- Linear operators. ---

    def embedding(self, ids: QTensor, weight: Tensor, layer: str) -> QTensor:
        """Look up rows of an int8 table with one scale per column."""
        table = _finite(weight, layer)
        scale = _nonzero(table.abs().amax(0) / 127)
        quantized = (table / scale).round().to(torch.int8)
        return self.node(
            "embedding", [ids], layer, dtype="int8", scale=scale, bound=127, constants={"table": quantized}
        )

    def linear(self, x: QTensor, weight: Tensor, bias: Tensor | None, layer: str) -> QTensor:
        """Multiply by an int8 weight [out, in] with one scale per row; a scale per channel of x is folded into it."""
        folded = _finite(weight, layer) * x.scale
        offset = torch.zeros(len(folded), dtype=torch.float64) if bias is None else _finite(bias, layer)
        # A row whose weights are small beside its bias takes a larger scale, so that the bias fits into 30 bits.
        scale = _nonzero(torch.maximum(folded.abs().amax(1) / 127, offset.abs() / 2**30))
        constants = {"weight": (folded / scale[:, None]).round().to(torch.int8)}
        q_bias = (offset / scale).round().to(torch.int64)
        if bias is not None:
            constants["bias"] = q_bias.to(torch.int32)
        bound = int((constants["weight"].to(torch.int64).abs().sum(1) * x.bound + q_bias.abs()).max())
        return self.node("linear", [x], layer, dtype="int32", scale=scale, bound=bound, constants=constants)

    def matmul(
        self, a: QTensor, b: QTensor, length: int, layer: str, *, transpose_b: bool = False, factor: float = 1.0
    ) -> QTensor:
        """Multiply two tensors over an axis of at most `length`; `factor` is part of the scale."""
        scale, bound = a.per_tensor_scale * b.per_tensor_scale * factor, a.bound * b.bound * length
        attributes: dict[str, Attribute] = {"transpose_b": int(transpose_b)}
        return self.node("matmul", [a, b], layer, dtype="int32", scale=scale, bound=bound, attributes=attributes)

    # --- Elementwise operators. ---

    def requantize(
        self, x: QTensor, scale: Tensor | float, layer: str, *, dtype: str = "int8", minimum: int | None = None,
        maximum: int | None = None, axis: int = -1,
    ) -> QTensor:  # fmt: skip
        """Change the scale; by default values are clamped to the symmetric range of the dtype."""
        limit = torch.iinfo(DTYPES[dtype]).max
        low, high = -limit if minimum is None else minimum, limit if maximum is None else maximum
        ratio = x.scale / _scale(scale)
        multiplier, shift = dyadic_tensors(ratio.tolist(), layer)
        if x.bound >= 2**32:
            raise ConversionError(f"{layer}: a requantized value can reach {x.bound}, whose product overflows int64.")
        reached = math.ceil(x.bound * float(ratio.max())) + 1
        return self.node(
            "requantize", [x], layer, dtype=dtype, scale=scale, bound=min(reached, max(-low, high)),
            attributes={"minimum": low, "maximum": high, "axis": axis},
            constants={"multiplier": multiplier, "shift": shift},
        )  # fmt: skip

    def add(self, a: QTensor, b: QTensor, layer: str) -> QTensor:
        """Add two tensors of one scale."""
        if a.per_tensor_scale != b.per_tensor_scale:
            raise ValueError(f"{a.name} and {b.name} have different scales")
        return self.node("add", [a, b], layer, dtype="int32", scale=a.scale, bound=a.bound + b.bound)

    def multiply(self, a: QTensor, b: QTensor, layer: str) -> QTensor:
        """Multiply two tensors element by element."""
        scale = a.per_tensor_scale * b.per_tensor_scale
        return self.node("multiply", [a, b], layer, dtype="int32", scale=scale, bound=a.bound * b.bound)

    def rope(self, x: QTensor, cos: QTensor, sin: QTensor, layer: str) -> QTensor:
        """Rotate the halves of the heads of x by angles whose cosines and sines are given."""
        scale, bound = x.per_tensor_scale * cos.per_tensor_scale, x.bound * (cos.bound + sin.bound)
        return self.node("rope", [x, cos, sin], layer, dtype="int32", scale=scale, bound=bound)

    def add_positions(self, x: QTensor, table: Tensor, layer: str) -> QTensor:
        """Add a table [tokens, width] to patches, after rows of zeros for the tokens before them."""
        quantized = (_finite(table, layer) / x.per_tensor_scale).round()
        bound = x.bound + int(quantized.abs().max())
        limit = torch.iinfo(torch.int32)
        return self.node(
            "add_positions", [x], layer, dtype="int32", scale=x.scale, bound=bound,
            constants={"table": quantized.clamp(limit.min, limit.max).to(torch.int32)},
        )  # fmt: skip

    def gelu(self, x: QTensor, layer: str) -> QTensor:
        """Apply i-GELU."""
        attributes, scale = gelu_constants(x.per_tensor_scale, x.bound, layer)
        bound = x.bound * (2 * attributes["q_one"] + 1)
        return self.node("gelu", [x], layer, dtype="int32", scale=scale, bound=bound, attributes={**attributes})

    def silu(self, x: QTensor, layer: str) -> QTensor:
        """Apply i-SiLU."""
        attributes, scale = silu_constants(x.per_tensor_scale, x.bound, layer)
        bound = x.bound << attributes["bits"]
        return self.node("silu", [x], layer, dtype="int32", scale=scale, bound=bound, attributes={**attributes})

    def tanh(self, x: QTensor, layer: str) -> QTensor:
        """Apply tanh, with int8 results."""
        attributes, scale = tanh_constants(x.per_tensor_scale, layer)
        return self.node("tanh", [x], layer, dtype="int8", scale=scale, bound=127, attributes={**attributes})

    # --- Operators along the last axis. ---

    def softmax(self, x: QTensor, mask: QTensor | None, length: int, layer: str, dtype: str = "int8") -> QTensor:
        """Apply i-softmax to rows of at most `length`; the probability 1 is the largest integer of the dtype."""
        levels = torch.iinfo(DTYPES[dtype]).max
        attributes, scale = softmax_constants(x.per_tensor_scale, length, layer, levels)
        inputs = [x] if mask is None else [x, mask]
        return self.node("softmax", inputs, layer, dtype=dtype, scale=scale, bound=levels, attributes={**attributes})

    def layer_norm(self, x: QTensor, weight: Tensor, bias: Tensor, epsilon: float, layer: str) -> QTensor:
        """Apply i-LayerNorm."""
        attributes, constants, scale = norm_constants(
            x.per_tensor_scale, x.bound, _finite(weight, layer), _finite(bias, layer), epsilon, layer
        )
        return self.node(
            "layer_norm", [x], layer, dtype="int32", scale=scale, bound=INT32_MAX,
            attributes={**attributes}, constants=constants,
        )  # fmt: skip

    def rms_norm(self, x: QTensor, weight: Tensor, epsilon: float, layer: str) -> QTensor:
        """Apply i-RMSNorm."""
        attributes, constants, scale = norm_constants(
            x.per_tensor_scale, x.bound, _finite(weight, layer), None, epsilon, layer
        )
        return self.node(
            "rms_norm", [x], layer, dtype="int32", scale=scale, bound=INT32_MAX,
            attributes={**attributes}, constants=constants,
        )  # fmt: skip

    # --- Operators that move values. ---

    def concat(self, a: QTensor, b: QTensor, axis: int, layer: str, dtype: str = "int8") -> QTensor:
        if not torch.equal(a.scale, b.scale):
            raise ValueError(f"{a.name} and {b.name} have different scales")
        bound = max(a.bound, b.bound)
        return self.node("concat", [a, b], layer, dtype=dtype, scale=a.scale, bound=bound, attributes={"axis": axis})

    def reshape(self, x: QTensor, shape: Sequence[int], layer: str, dtype: str = "int8") -> QTensor:
        return self._move("reshape", x, layer, dtype, {"shape": list(shape)})

    def permute(self, x: QTensor, axes: Sequence[int], layer: str, dtype: str = "int8") -> QTensor:
        return self._move("permute", x, layer, dtype, {"axes": list(axes)})

    def slice(self, x: QTensor, axis: int, start: int, stop: int, layer: str, dtype: str = "int8") -> QTensor:
        return self._move("slice", x, layer, dtype, {"axis": axis, "start": start, "stop": stop})

    def _move(self, op: str, x: QTensor, layer: str, dtype: str, attributes: Mapping[str, Attribute]) -> QTensor:
        return self.node(op, [x], layer, dtype=dtype, scale=x.scale, bound=x.bound, attributes=attributes)


def _scale(scale: Tensor | float) -> Tensor:
    return torch.as_tensor(scale, dtype=torch.float64).reshape(-1).cpu()


def _finite(tensor: Tensor, layer: str) -> Tensor:
    """Return a float64 copy on CPU; raise if it contains NaN or infinity."""
    values = tensor.detach().to(torch.float64).cpu()
    if not bool(values.isfinite().all()):
        raise ConversionError(f"{layer}: its weights contain NaN or infinity.")
    return values


def _nonzero(scale: Tensor) -> Tensor:
    """Replace scales of zero, whose values are all zero, by the largest one."""
    return torch.where(scale > 0, scale, scale.max() if float(scale.max()) > 0 else torch.ones_like(scale))
