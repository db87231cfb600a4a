"""Mixtures of experts of the fused GPU network: layers of all experts stacked, everything else on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.kernels.dispatch import forced_backend
from smelt.kernels.gated_activation import GatedActivation
from smelt.kernels.gpu import grouped, hopper_layout
from smelt.kernels.gpu.activations import QuantizedRows
from smelt.kernels.gpu.experts import Routing, combine, copy_experts, gather_rows, route
from smelt.kernels.gpu.fused_ops import MAX_QUANTIZED_WIDTH, act_and_mul, act_and_mul_quantize, add_rms_norm
from smelt.kernels.gpu.grouped import GroupedDense, GroupedLinear, GroupedPacked, choose_tile_size
from smelt.kernels.gpu.hopper_grouped import GroupedHopper
from smelt.kernels.gpu.hopper_linear import HopperLinear, layout_for
from smelt.kernels.gpu.vector import fused_gemv
from smelt.kernels.linear import ActivationQuant
from smelt.models.model import Model
from smelt.models.quantized import DEQUANTIZED, QuantizedLinear
from smelt.models.quantized_network import lacks_kernel
from smelt.runtime import decoder
from smelt.runtime.decoder import ExpertLayers, MixtureOfExperts

MAX_TOKENS = 2**14  # of a step whose kernels are compiled before they are needed
Experts = Sequence[Sequence[nn.Module]]  # layers with the same input, of each expert


@dataclass(frozen=True)
class GroupedExperts:
    """The layers of all experts stacked: two grouped GEMMs with a gate between them."""

    gate_up: GroupedLinear
    output: GroupedLinear
    activation: GatedActivation
    num_experts: int
    dtype: torch.dtype
    gate_up_bias: Tensor | None = None
    output_bias: Tensor | None = None

    @classmethod
    def stack(cls, experts: Sequence[ExpertLayers], activation: GatedActivation, dtype: torch.dtype) -> GroupedExperts:
        gate_up = [(expert.gate, expert.up) for expert in experts]
        output = [(expert.output,) for expert in experts]
        products = stack_linears(gate_up, dtype), stack_linears(output, dtype)
        biases = _stack_biases(gate_up, dtype), _stack_biases(output, dtype)
        return cls(*products, activation, len(experts), dtype, *biases)

    @property
    def tile_sizes(self) -> list[int]:
        return sorted(set(self.gate_up.tile_sizes) & set(self.output.tile_sizes))

    def add(self, x: Tensor, routing: Routing, hidden: Tensor) -> None:
        """Add the weighted outputs of the tokens' experts for x [tokens, width] to the hidden states, in place."""
        shared = len(x) == 1 and self.gate_up.quant is None
        inputs = x if shared else gather_rows(x, routing, self.gate_up.quant)
        gate_up = _add_bias(self.gate_up(inputs, routing, shared=shared), self.gate_up_bias, routing)
        output = self.output(self._gate(gate_up, routing), routing)
        combine(_add_bias(output, self.output_bias, routing), routing, hidden)

    def _gate(self, gate_up: Tensor, routing: Routing) -> Tensor | QuantizedRows:
        quant = self.output.quant
        if quant is None:
            return act_and_mul(gate_up, self.activation)
        row_experts = None if quant.static_scale is None else routing.row_experts
        return act_and_mul_quantize(gate_up, quant, self.activation, row_experts)

    def kernel_sources(self, top_k: int) -> set[str]:
        """Return the sources of the CUDA kernels of every number of tokens."""
        counts = [2**power for power in range(MAX_TOKENS.bit_length())]
        return {
            source
            for product in (self.gate_up, self.output)
            for tokens in counts
            for source in product.kernel_sources(
                tokens, top_k, choose_tile_size(tokens, top_k, self.num_experts, self.tile_sizes), self.dtype
            )
        }


class FusedExperts:
    """A mixture of experts: norm, router, top-k, and the experts."""

    def __init__(self, part: MixtureOfExperts, dtype: torch.dtype) -> None:
        self.part, self.experts = part, GroupedExperts.stack(part.experts, part.activation, dtype)

    def add(self, hidden: Tensor, residual: Tensor | None, active: Tensor | None) -> None:
        """Add `residual` to the hidden states [tokens, width], then the output of the mixture, both in place."""
        x = add_rms_norm(hidden, residual, self.part.norm.weight, self.part.norm.epsilon)
        self.experts.add(x, self.route(x, active), hidden)

    def route(self, x: Tensor, active: Tensor | None) -> Routing:
        part = self.part
        bias = part.router_bias
        logits = fused_gemv(x, part.router, bias) if len(x) == 1 else F.linear(x, part.router, bias)
        return route(
            logits, part.top_k, normalize=part.normalize, weight_dtype=part.weight_dtype,
            tile_size=choose_tile_size(len(x), part.top_k, len(part.experts), self.experts.tile_sizes), active=active,
        )  # fmt: skip

    def kernel_sources(self) -> set[str]:
        return self.experts.kernel_sources(self.part.top_k)


class SlottedExperts:
    """The experts of a layer in host memory, with copies of a few of them in slots on the device."""

    def __init__(self, experts: Sequence[ExpertLayers], activation: GatedActivation, slots: int) -> None:
        device = _weight(experts[0].output).device
        self._activation, self.num_experts = activation, len(experts)
        gate_up: Experts = [(expert.gate, expert.up) for expert in experts]
        output: Experts = [(expert.output,) for expert in experts]
        self.host = [_stack_dense(layers, in_host_memory=True) for layers in (gate_up, output)]
        self._matrices = [matrix.new_zeros(slots, *matrix.shape[1:], device=device) for matrix in self.host]
        self.slots = self.grouped(self._matrices)
        self.expert_bytes = sum(matrix[0].nbytes for matrix in self.host)

    def grouped(self, matrices: Sequence[Tensor]) -> GroupedExperts:
        """Return experts with these matrices on the device."""
        gate_up, output = matrices
        products = GroupedDense(gate_up), GroupedDense(output)
        return GroupedExperts(*products, self._activation, len(gate_up), gate_up.dtype)

    def put(self, buffers: Sequence[Tensor], places: Tensor) -> None:
        """Copy experts from buffers of the device to slots; `places` are those of `copy_experts`."""
        for buffer, matrices in zip(buffers, self._matrices, strict=True):
            copy_experts(buffer, matrices, places)


class ExpertLoader:
    """Copies the experts of a step that are in no slot to the device, while the layers before them run.

    They are known before the first layer. Two buffers hold those of a layer each: one is filled while the experts in
    the other one run. Without prefetching, a layer waits for its own copies. All of it can be captured.
    """

    def __init__(self, layers: Sequence[SlottedExperts], device: torch.device, prefetch: bool) -> None:
        self._layers = layers
        sizes = [max(layer.host[part].numel() for layer in layers) for part in range(2)]
        dtype = layers[0].host[0].dtype
        self._buffers = [[torch.empty(size, dtype=dtype, device=device) for size in sizes] for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if prefetch and device.type == "cuda" else None
        self._stream_events: dict[int, Any] = {}  # of each layer's copies
        self._joined = torch.zeros(1, device=device)

    def begin(self, experts: Tensor, loaded: Tensor, placed: Tensor) -> None:
        """Begin a step. `experts` [tokens] are those of tokens whose expert is in no slot, or -1; `loaded` [experts]
        says which experts to copy: their own index, or -1; `placed` [experts] in which slot each of them stays, or -1.
        """
        first = self._layers[0]
        sizes = first.slots.tile_sizes
        self._routing = route_to(experts, first.num_experts, sizes, experts >= 0)
        self._loaded, self._placed = loaded, placed
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            for index in range(min(2, len(self._layers))):
                self._load(index)

    def add(self, index: int, x: Tensor, hidden: Tensor) -> None:
        """Add the outputs of a layer's loaded experts for x [tokens, width] to the hidden states, in place."""
        if self._stream is None:
            self._load(index)
        else:
            torch.cuda.current_stream(self._stream.device).wait_event(self._stream_events[index])
            self._joined.zero_()  # so that dependent launches overlap this kernel, not the copies
        layer, buffers = self._layers[index], self._buffers_of(index)
        layer.grouped(buffers).add(x, self._routing, hidden)
        layer.put(buffers, self._placed)
        if self._stream is not None and index + 2 < len(self._layers):
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._load(index + 2)

    def _load(self, index: int) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for source, buffer in zip(self._layers[index].host, self._buffers_of(index), strict=True):
                copy_experts(source, buffer, self._loaded)
            if self._stream is not None:
                self._stream_events[index] = self._stream.record_event()

    def _buffers_of(self, index: int) -> list[Tensor]:
        parts = zip(self._buffers[index % 2], self._layers[index].host, strict=True)
        return [buffer[: matrix.numel()].view_as(matrix) for buffer, matrix in parts]


def route_to(experts: Tensor, num_experts: int, tile_sizes: Sequence[int], active: Tensor | None) -> Routing:
    """Route each token to the expert [tokens] that was chosen for it, with a weight of 1. Tokens with a negative one
    must not be active; weights are finite for them, too."""
    chosen = (experts[:, None] == torch.arange(num_experts, device=experts.device)) | (experts < 0)[:, None]
    logits = torch.where(chosen, 0.0, float("-inf"))
    size = choose_tile_size(len(experts), 1, num_experts, tile_sizes)
    return route(logits, 1, normalize=True, weight_dtype=torch.float32, tile_size=size, active=active)


def unsupported_reason(model: Model) -> str | None:
    """Return why a network cannot run fused on its GPU, or None if it can."""
    if (reason := decoder.unsupported_reason(model, carved_experts=True)) is not None:
        return reason
    layers = [layer.experts for layer in decoder.mixtures(model)]
    layers += [layer.experts for layer in decoder.carved_layers(model)]
    for layer in layers:
        for experts in ([(each.gate, each.up) for each in layer], [(each.output,) for each in layer]):
            if (reason := unstackable_reason(experts, model.network.dtype)) is not None:
                return reason
    return None


def slots_reason(model: Model) -> str | None:
    """Return why the fused network cannot run the carved experts of a model from slots, or None if it can."""
    layers = [
        layer
        for part in decoder.carved_layers(model)
        for expert in part.experts
        for layer in (expert.gate, expert.up, expert.output)
    ]
    if all(type(layer) is nn.Linear and layer.bias is None for layer in layers):
        return None
    return "its experts are quantized or have biases"


def unstackable_reason(experts: Experts, dtype: torch.dtype) -> str | None:
    """Return why the layers of experts have no grouped kernel, or None if they have one."""
    layers: list[Any] = [layer for expert in experts for layer in expert]
    if all(type(layer) is nn.Linear for layer in layers):
        return None
    first = layers[0]
    if not all(isinstance(layer, QuantizedLinear) and layer.scheme == first.scheme for layer in layers):
        return "the experts of a layer differ in format"
    if first.scheme.rank or first.scheme.hadamard or any(layer.round_inputs is not None for layer in layers):
        return "an expert has low-rank factors or rotated inputs"
    if all(layer.backend == DEQUANTIZED or lacks_kernel(layer, dtype) for layer in layers):  # then it is, or will be
        return None if first.scheme.inputs is None else "the format of its experts has no kernel on this device"
    if any(layer.moved for layer in layers):
        return "an engine has rearranged the weights of its experts"
    if len({tuple((layer.out_features, layer.in_features) for layer in expert) for expert in experts}) > 1:
        return "the quantized experts of a layer differ in width"
    if first.scheme.static and not all(_share_scale(expert) for expert in experts):
        return "the layers of an expert differ in the scale of their inputs"
    if first.inputs is not None and first.in_features > MAX_QUANTIZED_WIDTH:
        return "its layers are too wide to quantize their inputs"
    if _fits_hopper(experts[0], dtype) or grouped.supports(first.packed, first.inputs, dtype):
        return None
    return "the format of its experts has no grouped kernel on this device"


def _share_scale(layers: Sequence[Any]) -> bool:
    return all(torch.equal(layer.input_scale, layers[0].input_scale) for layer in layers)


def _fits_hopper(layers: Sequence[Any], dtype: torch.dtype) -> bool:
    if forced_backend() is not None or any(layer.out_features % hopper_layout.TILE_ROWS for layer in layers[:-1]):
        return False
    return layout_for(layers[0].packed, layers[0].inputs, dtype) is not None


def stack_linears(experts: Experts, dtype: torch.dtype) -> GroupedLinear:
    """Stack the layers of experts, which share the memory from then on."""
    first: Any = experts[0][0]
    if not isinstance(first, QuantizedLinear) or first.moved:
        return GroupedDense(_stack_dense(experts))
    inputs = _static_scales(experts, first.inputs)
    packed = [[layer.packed for layer in expert if isinstance(layer, QuantizedLinear)] for expert in experts]
    if forced_backend() is None and (product := GroupedHopper.stack(packed, inputs, dtype)) is not None:
        for index, expert in enumerate(experts):
            _move_to_hopper(expert, HopperLinear(product.expert(index), first.inputs))
        return product
    stacked = GroupedPacked.stack(packed, inputs, dtype)
    assert stacked is not None, "unsupported_reason has found a kernel"
    _share_packed(experts, stacked)
    return stacked


def experts_graph(
    product: GroupedLinear, columns: int, experts: int, tokens: int, dtype: torch.dtype
) -> Callable[[], None]:
    """Capture a grouped GEMM alone in a CUDA graph, to time it; return a call that runs it for the first `experts`,
    each with as many tokens. The inputs are quantized outside of the graph."""
    index = torch.arange(experts, device="cuda").repeat_interleave(tokens)
    logits = F.one_hot(index, experts).to(dtype)
    size = choose_tile_size(len(index), 1, experts, product.tile_sizes)
    routing = route(logits, 1, normalize=True, weight_dtype=torch.float32, tile_size=size)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(len(index), columns, generator=generator, device="cuda").to(dtype)
    inputs = gather_rows(x, routing, product.quant)
    product(inputs, routing)  # compile before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(inputs, routing)
    return partial(_replay, graph, inputs, routing)


def _replay(graph: torch.cuda.CUDAGraph, *inputs: object) -> None:
    """Replay a graph; the caller's reference keeps its inputs alive."""
    graph.replay()


def _stack_biases(experts: Experts, dtype: torch.dtype) -> Tensor | None:  # [experts + 1, rows]
    """Stack the biases of experts, and zeros for padding; experts that lost channels are padded to the widest one."""
    if all(layer.bias is None for expert in experts for layer in expert):
        return None
    widths = [max(_out_features(layer) for layer in part) for part in zip(*experts, strict=True)]
    first: Any = next(layer.bias for expert in experts for layer in expert if layer.bias is not None)
    stacked = torch.zeros(len(experts) + 1, sum(widths), dtype=dtype, device=first.device)
    for row, expert in zip(stacked, experts, strict=False):
        for layer, part in zip(expert, row.split(widths), strict=True):
            bias: Any = layer.bias
            if bias is not None:
                part[: len(bias)] = bias.detach()
    return stacked


def _out_features(layer: Any) -> int:
    return int(layer.out_features)


def _add_bias(y: Tensor, biases: Tensor | None, routing: Routing) -> Tensor:
    """Add the bias of each row's expert in place."""
    return y if biases is None else y.add_(biases[routing.row_experts])


def _static_scales(experts: Experts, inputs: ActivationQuant | None) -> ActivationQuant | None:
    """Collect the static input scales of experts, and one for padding."""
    if inputs is None or inputs.scale is None:
        return inputs
    scales = [expert[0].input_scale.reshape(1) for expert in experts]  # type: ignore[operator]
    return replace(inputs, scale=torch.cat([*scales, torch.ones_like(scales[0])]))


def _move_to_hopper(layers: Sequence[Any], product: HopperLinear) -> None:
    start = 0
    for layer in layers:
        layer.move_weights(replace(product, inputs=layer.inputs), slice(start, start + layer.out_features), "hopper")
        start += layer.out_features


def _share_packed(experts: Experts, stacked: GroupedPacked) -> None:
    """Replace the tensors of layers by views of the stacked ones, where they have a row for each of theirs."""
    start = 0
    for layer in (layer for expert in experts for layer in expert):
        assert isinstance(layer, QuantizedLinear)
        stop = start + layer.out_features
        for name in ("codes", "scale", "zero", "negative"):
            tensor, whole = getattr(layer, name, None), getattr(stacked.stacked, name)
            if tensor is not None and len(tensor) == layer.out_features:
                setattr(layer, name, whole[start:stop].view(tensor.dtype))
        start = stop


def _stack_dense(experts: Experts, *, in_host_memory: bool = False) -> Tensor:  # [experts, rows, columns]
    """Stack plain or dequantized weights, pinned if in host memory; experts that lost channels are padded with zeros to
    the widest one."""
    weights = [[_weight(layer) for layer in expert] for expert in experts]
    parts = [max(len(weight) for weight in part) for part in zip(*weights, strict=True)]
    columns = max(weight.shape[1] for part in weights for weight in part)
    first, shape = weights[0][0], (len(experts), sum(parts), columns)
    pinned = in_host_memory and first.is_cuda
    stacked = torch.zeros(shape, dtype=first.dtype, device="cpu" if in_host_memory else first.device, pin_memory=pinned)
    for index, expert in enumerate(experts):
        start = 0
        for layer, weight, size in zip(expert, weights[index], parts, strict=True):
            view = stacked[index, start : start + len(weight), : weight.shape[1]]
            view.copy_(weight)
            _share_weight(layer, view)
            start += size
    return stacked


def _weight(layer: Any) -> Tensor:
    weight: Tensor = layer.dequantized_weight if isinstance(layer, QuantizedLinear) else layer.weight.detach()
    return weight


def _share_weight(layer: Any, view: Tensor) -> None:
    if isinstance(layer, QuantizedLinear):
        layer.set_dequantized_weight(view)
    else:
        layer.weight.data = view
