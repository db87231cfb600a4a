"""Convert networks of convolutions (QuartzNet, ResNet, MobileNet) to an integer graph (Q-ASR).

The float network is traced with torch.export, so that any architecture of the operators below is converted. Weights
have one scale per output channel, activations one per tensor. A tensor after a ReLU is unsigned: the ReLU is the
minimum of its requantization. The operands of a residual sum are requantized to a scale `2**_SUM_BITS` times finer than
that of the sum, so that the sum is rounded once. The logits have 16 bits and one scale for all classes, with room for
values beyond the calibrated range, so that arg max needs no float.

A batch of recordings of different lengths is padded, and the graph multiplies by a mask of ones and zeros where the
float network does: before every convolution over time. Each recording then has the bits that it has alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node as FloatNode
from transformers import PreTrainedModel

from smelt.errors import ConversionError
from smelt.models.batch_norm import BATCH_NORMS
from smelt.models.implants import refuse_implants
from smelt.runtime.integer.builder import GraphBuilder, QTensor
from smelt.runtime.integer.graph import DTYPES, IntegerGraph
from smelt.runtime.integer.run import Interpreter, add_default_inputs
from smelt.runtime.integer.traced_network import MASK, TracedNetwork

LOGITS = "logits"
_SUM_BITS = 8
_LOGIT_LIMIT = 2**15 - 1
_LOGIT_HEADROOM = 16  # logits beyond the range of the calibration data must not become equal
_MAX_BIAS = 2**30
_END = 2**63 - 1  # of a slice without an end, in a traced network
_SMALLEST_SCALE_RATIO = 2.0**-24  # of the scales of two output channels

_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.conv1d.default: "conv1d", _aten.conv2d.default: "conv2d"}
_SUMS = (_aten.add.Tensor, _aten.add_.Tensor)
_RELUS = (_aten.relu.default, _aten.relu_.default)
_CLIPS = (_aten.hardtanh.default, _aten.hardtanh_.default, _aten.relu6.default)
_LAYERS = (
    nn.Conv1d, nn.Conv2d, nn.Linear, nn.ReLU, nn.ReLU6, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten,
    nn.Dropout, nn.Identity,
)  # fmt: skip
_IDENTITIES = (_aten.dropout.default, _aten.contiguous.default, _aten.alias.default, _aten.clone.default)
_CASTS = (_aten.to.dtype, _aten._to_copy.default)


@dataclass(frozen=True)
class BitWidths:
    """Bits of weights and activations; activations after a ReLU use all of them for values from zero."""

    weights: int = 8
    activations: int = 8

    def __post_init__(self) -> None:
        if not (2 <= self.weights <= 8 and 2 <= self.activations <= 8):
            raise ConversionError(
                f"weights of {self.weights} and activations of {self.activations} bits: 2 to 8 exist."
            )

    def activation_range(self, unsigned: bool) -> tuple[int, int]:
        limit = 2**self.activations - 1 if unsigned else 2 ** (self.activations - 1) - 1
        return (0, limit) if unsigned else (-limit, limit)


def is_convolutional(network: PreTrainedModel) -> bool:
    """Return whether a network is one of convolutions alone: no embeddings and no layer norms."""
    modules = list(network.modules())
    return any(isinstance(module, nn.Conv1d | nn.Conv2d) for module in modules) and not any(
        isinstance(module, nn.Embedding | nn.LayerNorm) for module in modules
    )


def check_convolutions(network: PreTrainedModel) -> None:
    """Raise if a layer has no integer form, naming it; weights may be on the meta device."""
    refuse_implants(network, "integer graphs do not compute it")
    for path, module in network.named_modules():
        if not any(True for _ in module.children()) and not isinstance(module, (*_LAYERS, *BATCH_NORMS)):
            raise ConversionError(f"{path}: {type(module).__name__} has no integer form.")


def convert_convolutions(
    traced: TracedNetwork,
    ranges: Mapping[str, float],
    bits: BitWidths = BitWidths(),  # noqa: B008
    *,
    unsigned_input: bool = False,
) -> tuple[IntegerGraph, dict[str, str]]:
    """Return the integer graph and, for its tensors of 8 bits and its logits, the names of the float tensors they
    stand for.

    `ranges` has the largest magnitude of every tensor that `TracedNetwork.run` shows. The input of the graph is that of
    the network in int8 (uint8 if it is never negative, as pixels are), by `scales[input]`, and the mask of
    recordings, if the network reads one; its output is `logits` in int16.
    """
    conversion = _Conversion(traced, ranges, bits, unsigned_input)
    return conversion.convert(), conversion.sources


def tensor_sqnr(
    traced: TracedNetwork, graph: IntegerGraph, sources: Mapping[str, str], values: Tensor
) -> dict[str, float]:
    """Return the signal-to-quantization-noise ratio in decibels of the tensors in `sources`, for a float input."""
    expected: dict[str, Tensor] = {}
    traced.run(values, lambda name, value: expected.update({name: value.clone()}))
    dtype = DTYPES[graph.inputs[traced.input]]
    limits = torch.iinfo(dtype)
    scaled = values.double() / torch.tensor(graph.scales[traced.input], dtype=torch.float64)
    quantized = scaled.round().clamp(limits.min, limits.max).to(dtype)
    ratios = {}
    for node, tensor in Interpreter(graph).trace(add_default_inputs({traced.input: quantized})):
        if node.output in sources:
            signal = expected[sources[node.output]].double()
            noise = signal - graph.dequantize(node.output, tensor).double()
            ratios[node.output] = float(10 * (signal.square().sum() / noise.square().sum().clamp(min=1e-30)).log10())
    return ratios


class _Conversion:
    def __init__(
        self, traced: TracedNetwork, ranges: Mapping[str, float], bits: BitWidths, unsigned_input: bool
    ) -> None:
        self.traced, self.ranges, self.bits, self.unsigned_input = traced, ranges, bits, unsigned_input
        inputs = {traced.input: "uint8" if unsigned_input else "int8", **({MASK: "int8"} if traced.has_mask else {})}
        self.builder = GraphBuilder(inputs)
        self.values: dict[str, QTensor] = {}
        self.dtypes: dict[str, str] = {}  # of graph tensors
        self.sources: dict[str, str] = {}
        self.axes: dict[str, int] = {}  # of graph tensors whose scales are per channel: the axis of the channels
        self.masks: set[str] = set()  # float tensors that are a mask of ones and zeros
        self.means: set[str] = set()  # graph tensors that are means

    def convert(self) -> IntegerGraph:
        name = self.traced.input
        low, limit = self.bits.activation_range(self.unsigned_input)
        dtype = self.builder.graph.inputs[name]
        scale = self._scale(name, limit)
        self.builder.graph.scales[name] = scale
        self.values[name] = self._keep(self.builder.input(name, scale, 255 if self.unsigned_input else 128), dtype)
        if self.bits.activations < 8:
            self.values[name] = self._requantize(self.values[name], scale, name, dtype, low, limit)
        if self.traced.has_mask:
            self.values[MASK] = self._keep(self.builder.input(MASK, bound=1), "int8")
            self.masks.add(MASK)
        for node in self.traced.nodes:
            converted = self._convert(node)
            if converted is not None:
                self.values[node.name] = converted
        logits = self._logits()
        self.sources[LOGITS] = self.traced.output
        graph = self.builder.finish({LOGITS: logits})
        for node_name in [name for name in self.axes if name in graph.scales and self.axes[name] != -1]:
            del graph.scales[node_name]  # scales of a graph are along the last axis
        return graph

    def _convert(self, node: FloatNode) -> QTensor | None:
        target: Any = node.target
        layer = _layer(node)
        if node.args and getattr(node.args[0], "name", "") in self.masks:
            return self._mask(node, layer)
        if target is _aten.mul.Tensor and getattr(node.args[1], "name", "") in self.masks:
            return self._masked(node, layer)
        if target in _CONVOLUTIONS or target is _aten.linear.default:
            return self._product(node, layer)
        if target in _RELUS or target in _CLIPS:
            return self._relu(node, layer)
        if target in _SUMS and isinstance(node.args[1], FloatNode) and not node.kwargs:
            return self._sum(node, layer)
        if target in _IDENTITIES:
            return self.values[_name(node.args[0])]
        if target is _aten.adaptive_avg_pool2d.default and list(node.args[1]) == [1, 1]:  # type: ignore[arg-type]
            return self._mean(node, layer)
        if target is _aten.mean.dim:
            return self._mean(node, layer)
        if target in (_aten.avg_pool2d.default, _aten.max_pool2d.default):
            return self._pool(node, layer)
        if target in (_aten.flatten.using_ints, _aten.view.default, _aten.reshape.default):
            return self._flatten(node, layer)
        if target in (_aten.transpose.int, _aten.permute.default):
            return self._permute(node, layer)
        if not isinstance(node.meta.get("val"), Tensor):  # the size of an axis
            return None
        raise ConversionError(f"{layer}: the operator {target} has no integer form.")

    # --- Operators. ---

    def _product(self, node: FloatNode, layer: str) -> QTensor:
        """Convolve or multiply: int8 weights with a scale per output channel, int32 bias and sums."""
        target: Any = node.target
        op = _CONVOLUTIONS.get(target, "linear")
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        x = self._activation(_name(given["input"]), layer)
        weight = self._parameter(given["weight"], layer).double()
        bias = None if given.get("bias") is None else self._parameter(given["bias"], layer).double()
        limit = 2 ** (self.bits.weights - 1) - 1
        rows = weight.flatten(1) * x.per_tensor_scale
        offset = torch.zeros(len(rows), dtype=torch.float64) if bias is None else bias
        scale = torch.maximum(rows.abs().amax(1) / limit, offset.abs() / _MAX_BIAS)
        # A channel whose weights vanish beside the others' is zero in 8 bits, whatever its scale; one that is too small
        # would have no dyadic ratio to that of the result.
        scale = scale.clamp(min=max(float(scale.max()) * _SMALLEST_SCALE_RATIO, 1e-30))
        quantized = (rows / scale[:, None]).round().clamp(-limit, limit)
        q_bias = (offset / scale).round().to(torch.int64)
        constants = {"weight": quantized.to(torch.int8).reshape(weight.shape)}
        if bias is not None:
            constants["bias"] = q_bias.to(torch.int32)
        bound = int((quantized.abs().sum(1).to(torch.int64) * x.bound + q_bias.abs()).max())
        attributes = {} if op == "linear" else _convolution_attributes(op, given, layer)
        result = self.builder.node(
            op, [x], layer, dtype="int32", scale=scale, bound=bound, attributes=attributes, constants=constants
        )
        return self._keep(result, "int32", axis=-1 if op == "linear" else 1)

    def _relu(self, node: FloatNode, layer: str) -> QTensor:
        """Requantize to unsigned integers; the upper bound of ReLU6 is the maximum of the requantization."""
        target: Any = node.target
        ceiling = math.inf
        if target in _CLIPS:
            low, ceiling = (float(bound) for bound in (*node.args[1:3], *(0.0, 6.0)[len(node.args) - 1 :]))  # type: ignore[arg-type]
            if low != 0:
                raise ConversionError(f"{layer}: clipping from {low:g} on has no integer form; from 0 on has one.")
        source = self.values[_name(node.args[0])]
        _, limit = self.bits.activation_range(unsigned=True)
        scale = self._scale(node.name, limit)
        maximum = min(limit, math.floor(ceiling / scale + 0.5)) if math.isfinite(ceiling) else limit
        result = self._requantize(source, scale, layer, "uint8", 0, maximum)
        self.sources[result.name] = node.name
        return result

    def _sum(self, node: FloatNode, layer: str) -> QTensor:
        operands = [self.values[_name(argument)] for argument in node.args[:2]]
        # A sum that only a ReLU reads has the scale of the ReLU's result.
        readers = self.traced.readers(node.name)
        name = readers[0].name if len(readers) == 1 and readers[0].target in _RELUS else node.name
        _, limit = self.bits.activation_range(unsigned=name != node.name)
        scale = self._scale(name, limit) / 2**_SUM_BITS
        fine = [self._requantize(operand, scale, layer, "int32", None, None) for operand in operands]
        return self._keep(self.builder.add(fine[0], fine[1], layer), "int32")

    def _mask(self, node: FloatNode, layer: str) -> QTensor | None:
        """Convert what is done to the mask before a product: a new axis, a cast, every n-th frame."""
        if not isinstance(node.meta.get("val"), Tensor):  # an assertion
            return None
        target, (source, *arguments) = node.target, node.args
        x, axes = self.values[_name(source)], _shaped(source).ndim
        if target is _aten.unsqueeze.default and (axes, arguments[0]) == (2, 1):
            x = self._keep(self.builder.reshape(x, [0, 1, -1], "mask"), "int8")
        elif target is _aten.slice.Tensor and (step := _frame_step(arguments, axes)):
            if step > 1:
                attributes: dict[str, Any] = {"kernel": [1], "stride": [step]}
                x = self.builder.node("max_pool", [x], "mask", dtype="int8", scale=1.0, bound=1, attributes=attributes)
                x = self._keep(x, "int8")
        elif target not in (*_CASTS, *_IDENTITIES):
            raise ConversionError(f"{layer}: the operator {target} on a mask has no integer form.")
        self.masks.add(node.name)
        return x

    def _masked(self, node: FloatNode, layer: str) -> QTensor:
        """Set the frames outside of the recordings to zero."""
        x, mask = self._activation(_name(node.args[0]), layer), self.values[_name(node.args[1])]
        dtype = self.dtypes[x.name]
        limit = torch.iinfo(DTYPES[dtype]).max
        result = self.builder.node("multiply", [x, mask], layer, dtype=dtype, scale=x.scale, bound=min(x.bound, limit))
        return self._keep(replace(result, bound=x.bound), dtype)  # -128 stays what it is

    def _mean(self, node: FloatNode, layer: str) -> QTensor:
        """Average over the axes after the channels: an integer sum whose scale has the division in it."""
        source = _name(node.args[0])
        dims = getattr(_shaped(node.args[0]), "ndim", 0)
        if node.target is _aten.mean.dim:
            axes = sorted(axis % dims for axis in node.args[1])  # type: ignore[union-attr, operator]
            if axes != list(range(2, dims)):
                raise ConversionError(
                    f"{layer}: a mean over other axes than all after the channels has no integer form."
                )
        count = math.prod(int(size) for size in _shaped(node.args[0]).shape[2:])
        x = self._activation(source, layer)
        result = x
        for _ in range(dims - 2):
            result = self._keep(
                self.builder.node(
                    "mean", [result], layer, dtype="int32", scale=x.scale, bound=result.bound * count,
                    attributes={"axis": -1},
                ),
                "int32",
            )  # fmt: skip
        result = QTensor(result.name, x.scale / count, x.bound * count)
        self.builder.graph.scales[result.name] = float(result.scale)
        self.means.add(result.name)
        return result

    def _pool(self, node: FloatNode, layer: str) -> QTensor:
        window = _pair(node.args[1])
        stride = _pair(node.args[2]) if len(node.args) > 2 and node.args[2] else window
        plain = all(not any(_pair(argument)) for argument in node.args[3:4]) and len(node.args) <= 4 and not node.kwargs
        if not plain:
            raise ConversionError(f"{layer}: pooling with padding, dilation or a ceiling has no integer form.")
        x = self._activation(_name(node.args[0]), layer)
        attributes = {"kernel": window, "stride": stride}
        if node.target is _aten.max_pool2d.default:
            dtype = self.dtypes[x.name]
            result = self.builder.node(
                "max_pool", [x], layer, dtype=dtype, scale=x.scale, bound=x.bound, attributes=attributes
            )
            return self._keep(result, dtype)
        count = math.prod(window)
        result = self.builder.node(
            "avg_pool", [x], layer, dtype="int32", scale=x.scale / count, bound=x.bound * count, attributes=attributes
        )
        return self._keep(result, "int32")

    def _flatten(self, node: FloatNode, layer: str) -> QTensor:
        x = self.values[_name(node.args[0])]
        before, after = _shaped(node.args[0]).shape, _shaped(node).shape
        if len(after) != 2 or math.prod(before[1:]) != after[1]:
            raise ConversionError(f"{layer}: reshaping to other than [batch, features] has no integer form.")
        if x.name in self.means:
            return x  # the integer mean drops the axes that it sums over
        x = self._activation(_name(node.args[0]), layer)
        dtype = self.dtypes[x.name]
        return self._keep(self.builder.reshape(x, [0, -1], layer, dtype), dtype)

    def _permute(self, node: FloatNode, layer: str) -> QTensor:
        x = self.values[_name(node.args[0])]
        axes = list(range(_shaped(node.args[0]).ndim))
        if node.target is _aten.transpose.int:
            first, second = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
            axes[first], axes[second] = axes[second], axes[first]
        else:
            axes = [int(axis) for axis in node.args[1]]  # type: ignore[union-attr, arg-type]
        if node.name == self.traced.output:
            x = self._to_logits(x, _name(node.args[0]), layer)
        else:
            x = self._activation(_name(node.args[0]), layer)
        dtype = self.dtypes[x.name]
        return self._keep(self.builder.permute(x, axes, layer, dtype), dtype)

    def _logits(self) -> QTensor:
        x = self.values[self.traced.output]
        return x if self.dtypes[x.name] == "int16" else self._to_logits(x, self.traced.output, "logits")

    def _to_logits(self, x: QTensor, name: str, layer: str) -> QTensor:
        scale = self._scale(name, _LOGIT_LIMIT // _LOGIT_HEADROOM)
        return self._requantize(x, scale, layer, "int16", -_LOGIT_LIMIT, _LOGIT_LIMIT)

    # --- Tensors. ---

    def _activation(self, name: str, layer: str) -> QTensor:
        """Return a tensor in 8 bits; an accumulator is requantized by the range of its float tensor, once."""
        x = self.values[name]
        if self.dtypes[x.name] in ("int8", "uint8"):
            return x
        low, limit = self.bits.activation_range(unsigned=False)
        self.values[name] = self._requantize(x, self._scale(name, limit), layer, "int8", low, limit)
        self.sources[self.values[name].name] = name
        return self.values[name]

    def _requantize(
        self, x: QTensor, scale: float, layer: str, dtype: str, low: int | None, high: int | None
    ) -> QTensor:
        axis = self.axes.get(x.name, -1)
        result = self.builder.requantize(x, scale, layer, dtype=dtype, minimum=low, maximum=high, axis=axis)
        return self._keep(result, dtype)

    def _keep(self, x: QTensor, dtype: str, axis: int | None = None) -> QTensor:
        self.dtypes[x.name] = dtype
        if axis is not None:
            self.axes[x.name] = axis
        return x

    def _scale(self, name: str, limit: int) -> float:
        """Return the scale with which the range of a float tensor is `limit`."""
        largest = self.ranges.get(name)
        if largest is None or not math.isfinite(largest):
            raise ConversionError(f"{name}: the calibration data gives no finite range for this tensor.")
        return max(largest, 1e-8) / limit

    def _parameter(self, argument: Any, layer: str) -> Tensor:
        tensor = self.traced.tensors.get(getattr(argument, "name", ""))
        if tensor is None:
            raise ConversionError(f"{layer}: its weight is computed, and only stored weights have an integer form.")
        if not bool(tensor.isfinite().all()):
            raise ConversionError(f"{layer}: its weights contain NaN or infinity.")
        return tensor.cpu()


def _frame_step(arguments: Sequence[Any], axes: int) -> int:
    """Return n of a slice that keeps every n-th position of the last axis, 1 of one that keeps all of any, else 0."""
    axis, start, end, step = [*arguments, 1][:4]
    return int(step) if (start, end) == (0, _END) and (step == 1 or axis % axes == axes - 1) else 0


def _convolution_attributes(op: str, given: Mapping[str, Any], layer: str) -> dict[str, Any]:
    axes = 1 if op == "conv1d" else 2
    if isinstance(given.get("padding"), str):
        raise ConversionError(f"{layer}: padding {given['padding']!r} has no integer form; give numbers.")
    sizes = {
        key: _spread(given.get(key), default, axes) for key, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    plain: dict[str, Any] = {key: value[0] for key, value in sizes.items()} if axes == 1 else dict(sizes)
    return {**plain, "groups": int(given.get("groups", 1))}


def _spread(value: Any, default: int, axes: int) -> list[int]:
    values = [default] if value is None else [int(each) for each in ([value] if isinstance(value, int) else value)]
    return values * axes if len(values) == 1 else values


def _pair(value: Any) -> list[int]:
    return _spread(value, 0, 2)


def _name(argument: Any) -> str:
    assert isinstance(argument, FloatNode)
    return argument.name


def _shaped(argument: Any) -> Tensor:
    value: Tensor = argument.meta["val"]
    return value


def _layer(node: FloatNode) -> str:
    """Return the path of the module that runs an operator."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return (stack[-1][0] if stack else "") or node.name
