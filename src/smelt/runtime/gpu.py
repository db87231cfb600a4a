"""A decoder on a GPU: the same function as the module's, with its small operations fused in Triton kernels.

All inputs are on the device and nothing is read back, so a step can be captured in a CUDA graph. A single token takes a
shorter path, with norms, gates and residual additions fused into the GEMVs. Steps with LoRA adapters have two more
kernels per linear layer that some adapter changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.kernels.dispatch import forced_backend
from smelt.kernels.gated_activation import SILU, GatedActivation
from smelt.kernels.gpu.activations import QuantizedRows, RowQuant
from smelt.kernels.gpu.experts import Routing
from smelt.kernels.gpu.fused_ops import (
    MAX_QUANTIZED_WIDTH,
    act_and_mul,
    act_and_mul_quantize,
    add_rms_norm,
    add_rms_norm_quantize,
    embed,
    norm_and_clip_qkv,
)
from smelt.kernels.gpu.hopper import ARCHITECTURE, GEMM_KERNEL
from smelt.kernels.gpu.hopper import gemv as hopper_gemv
from smelt.kernels.gpu.hopper_layout import TILE_ROWS
from smelt.kernels.gpu.hopper_linear import HopperLinear
from smelt.kernels.gpu.lora import lora_expand_add, lora_shrink
from smelt.kernels.gpu.nvrtc import compile_all
from smelt.kernels.gpu.rope import RotaryParams
from smelt.kernels.gpu.vector import fused_gemv
from smelt.kernels.lora import LoraTiles
from smelt.models.lora import StackedFactors
from smelt.models.quantized import QuantizedLinear
from smelt.models.quantized_network import merge_dequantized
from smelt.runtime.decoder import (
    Attention,
    CarvedExperts,
    Decoder,
    DecoderPart,
    FeedForward,
    MixtureOfExperts,
    Norm,
    merge_linears,
)
from smelt.runtime.gpu_experts import ExpertLoader, FusedExperts, GroupedExperts, SlottedExperts, route_to

# Queries, keys and values of all heads [tokens, heads * head_dim], before RoPE -> [tokens, heads * head_dim]
Attend = Callable[[Tensor, Attention], Tensor]


def compile_kernels(sources: set[str]) -> Iterator[bytes]:
    """Compile matmuls before they are needed; yield as they are done."""
    return compile_all(sources, GEMM_KERNEL, ARCHITECTURE)


class FusedNetwork:
    """Compute hidden states and logits from embedded tokens; the caller provides the attention function.

    `lora` has the adapters' factors by the first of the layers that share an input. With `expert_slots`, so many carved
    experts are on the device at a time, and the others are loaded when they are needed.
    """

    def __init__(
        self, network: Decoder, max_num_seqs: int, lora: Mapping[nn.Module, StackedFactors] | None = None,
        *, expert_slots: int | None = None, expert_prefetch: bool = True,
    ) -> None:  # fmt: skip
        self.decoder, lora = network, lora or {}
        heads = max(part.num_kv_heads for part in network.parts if isinstance(part, Attention))
        self.split_counter = torch.zeros(max_num_seqs * heads, dtype=torch.int32, device=network.embedding.device)
        dtype = network.embedding.dtype
        self._layers = [_fuse_part(part, dtype, lora, expert_slots) for part in network.parts]
        self._leaders = {part.map_of for part in network.parts if isinstance(part, Attention)}
        self._lm_head = FusedLinear([network.lm_head], dtype)
        self.has_experts = any(isinstance(layer, FusedExperts | FusedCarvedExperts) for layer in self._layers)
        self._carved = [layer for layer in self._layers if isinstance(layer, FusedCarvedExperts)]
        slotted = [layer.slotted for layer in self._carved if layer.slotted is not None]
        self._loader = ExpertLoader(slotted, network.embedding.device, expert_prefetch) if slotted else None
        self.expert_bytes = sum(layer.expert_bytes for layer in slotted)  # of one expert in all layers

    def kernel_sources(self) -> set[str]:
        """Return the sources of the matmuls of every batch size, for `compile_kernels`."""
        pairs = [layer for layer in self._layers if isinstance(layer, tuple)]
        pairs += [layer.shared for layer in self._layers if isinstance(layer, FusedCarvedExperts)]
        linears = [self._lm_head, *(linear for pair in pairs for linear in pair)]
        products = [product for linear in linears for product in linear.products]
        shapes = {(product.weights.layout, *product.weights.tiles.shape): product for product in products}
        dtype = self.decoder.embedding.dtype
        sources = {source for product in shapes.values() for source in product.kernel_sources(dtype)}
        for layer in self._layers:
            sources |= set() if isinstance(layer, tuple) else layer.kernel_sources()
        return sources

    def embed(self, token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:  # [tokens, width]
        """Look up embeddings of tokens [tokens]; a negative id means the last token of its slot."""
        hidden = embed(token_ids, slots, last_tokens, self.decoder.embedding)
        scale = self.decoder.embedding_scale
        return hidden if scale == 1.0 else hidden.mul_(scale)

    def hidden(
        self,
        hidden: Tensor,
        attend: Attend,
        tiles: LoraTiles | None = None,
        active: Tensor | None = None,
        experts: Tensor | None = None,
        loads: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:  # [tokens, width] -> the same
        """Run all layers in place and return the hidden states before the final norm. `tiles`: tokens with adapters.

        Tokens that are not `active` (bool [tokens]) are padding: no expert is read for them. `experts` [tokens] are
        those of carved feed-forwards, or with expert slots the slots that they are in; `loads` are the arguments of
        `ExpertLoader.begin` if experts of this step are in no slot.
        """
        residual: Tensor | None = None
        shared: dict[int, Tensor] = {}  # queries, keys and values by layer, where others use its map
        routing = None if experts is None else self._route_to(experts, active)
        loader = None if loads is None else self._loader
        if loader is not None and loads is not None:
            loader.begin(*loads)
        carved = 0
        for part, layer in zip(self.decoder.parts, self._layers, strict=True):
            y: Tensor | QuantizedRows
            if isinstance(layer, FusedExperts):
                layer.add(hidden, residual, active)
                residual = None
                continue
            if isinstance(layer, FusedCarvedExperts):
                assert routing is not None
                x, residual = layer.add(hidden, residual, routing)
                if loader is not None:
                    loader.add(carved, x, hidden)
                carved += 1
                continue
            first, second = layer
            if isinstance(part, Attention):
                qkv = _with_queries(first.norm_forward(hidden, residual, part.norm, tiles), part, shared)
                if part.layer in self._leaders:
                    shared[part.layer] = qkv
                y = attend(qkv, part)
            else:
                assert isinstance(part, FeedForward)
                quant = None if second.is_adapted(tiles) else second.quant
                y = first.norm_forward_gated(hidden, residual, part.norm, part.activation, quant, tiles)
            if part.post_norm is not None:
                norm = part.post_norm
                residual = add_rms_norm(second.forward(y, tiles), None, norm.weight, norm.epsilon)
            elif part.residual_scale != 1.0:
                residual = second.forward(y, tiles).mul_(part.residual_scale)
            else:
                residual = second.forward_add(y, hidden, tiles)
        return hidden if residual is None else add_rms_norm(hidden, residual, None, 0.0)

    def _route_to(self, experts: Tensor, active: Tensor | None) -> Routing:
        """Sort tokens by their experts, which are the same in all layers."""
        sizes = set.intersection(*(set(layer.own.tile_sizes) for layer in self._carved))
        return route_to(experts, self._carved[0].own.num_experts, sorted(sizes), active)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head.norm_forward(hidden, None, self.decoder.final_norm)

    def rotary_params(self, part: Attention) -> RotaryParams:
        norms, epsilon = None, 0.0
        if part.query_norm is not None and part.key_norm is not None and not part.joint_norms:
            norms, epsilon = (part.query_norm.weight, part.key_norm.weight), part.query_norm.epsilon
        rotary = part.rotary
        return RotaryParams(rotary.cosines, rotary.sines, norms, epsilon, rotary.rotary_dim, rotary.interleaved)


class FusedCarvedExperts:
    """A feed-forward carved into experts: the channels of all tokens, and those of each token's expert."""

    def __init__(self, part: CarvedExperts, dtype: torch.dtype, slots: int | None) -> None:
        self.part = part.shared
        self.shared = FusedLinear(part.shared.input_projections, dtype), FusedLinear([part.shared.output], dtype)
        self.slotted = None if slots is None else SlottedExperts(part.experts, part.shared.activation, slots)
        self.own = (
            GroupedExperts.stack(part.experts, part.shared.activation, dtype)
            if self.slotted is None
            else self.slotted.slots
        )

    def add(self, hidden: Tensor, residual: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """Add `residual` to the hidden states and the experts' outputs, in place; return the experts' input, and what
        is still to be added."""
        first, second = self.shared
        norm = self.part.norm
        assert norm is not None
        x = add_rms_norm(hidden, residual, norm.weight, norm.epsilon)
        y = second.forward(act_and_mul(first.forward(x), self.part.activation))
        self.own.add(x, routing, hidden)
        return x, y

    def kernel_sources(self) -> set[str]:
        return self.own.kernel_sources(1)


def _fuse_part(
    part: DecoderPart, dtype: torch.dtype, lora: Mapping[nn.Module, StackedFactors], expert_slots: int | None
) -> tuple[FusedLinear, FusedLinear] | FusedExperts | FusedCarvedExperts:
    if isinstance(part, MixtureOfExperts):
        return FusedExperts(part, dtype)
    if isinstance(part, CarvedExperts):
        return FusedCarvedExperts(part, dtype, expert_slots)
    first = FusedLinear(part.input_projections, dtype, lora.get(part.input_projections[0]))
    return first, FusedLinear([part.output], dtype, lora.get(part.output))


def _with_queries(projected: Tensor, part: Attention, shared: Mapping[int, Tensor]) -> Tensor:
    """Return queries, keys and values of a layer as attention takes them: after norms over all heads together.

    A layer that uses the map of another projects values alone. It gets the other's queries and keys; storing these keys
    again changes nothing, since both layers have the same pages for them.
    """
    if part.map_of is not None:
        return torch.cat((shared[part.map_of][:, : -projected.shape[1]], projected), dim=1)
    if part.joint_norms and part.query_norm is not None and part.key_norm is not None:
        norms = part.query_norm, part.key_norm
        norm_and_clip_qkv(projected, norms[0].weight, norms[1].weight, norms[0].epsilon, part.clip)
    return projected


class FusedLinear:
    """Layers that share an input, merged into one GEMM if possible, with the operations fused before and after it.

    Layers in different formats have one product per format on Hopper GPUs, each with its columns of the results.
    """

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype, lora: StackedFactors | None = None) -> None:
        self.dtype, self.lora = dtype, lora
        self.products, self._biases = _move_to_hopper(layers, dtype)
        merged: nn.Module | None = merge_dequantized(layers)
        if merged is None:
            merged = layers[0] if len(layers) == 1 else None if self.products else merge_linears(layers)
        self.layers = list(layers) if merged is None else [merged]
        plain = merged is not None and type(merged) is nn.Linear
        self.fuses_gemv = plain or (bool(self.products) and all(product.has_gemv for product in self.products))

    @property
    def quant(self) -> RowQuant | None:
        """How the operation before should quantize the inputs; None: not."""
        return self.products[0].quant if len(self.products) == 1 else None

    def is_adapted(self, tiles: LoraTiles | None) -> bool:
        """Return whether adapters change the outputs for these tokens; then the inputs are needed unquantized."""
        return self.lora is not None and tiles is not None

    def norm_forward(
        self, hidden: Tensor, residual: Tensor | None, norm: Norm | None, tiles: LoraTiles | None = None
    ) -> Tensor:
        """Project the norm of hidden + residual, or the sum if there is no norm; the sum replaces hidden in place."""
        if norm is None:
            return self.forward(_add_residual(hidden, residual), tiles)
        if self.is_adapted(tiles):
            return self._adapted(add_rms_norm(hidden, residual, norm.weight, norm.epsilon), tiles)
        if self._fuses_norm(hidden, norm):
            return self._gemv(_add_residual(hidden, residual), norm=norm.weight, epsilon=norm.epsilon)
        return self(self._norm(hidden, residual, norm))

    def norm_forward_gated(
        self, hidden: Tensor, residual: Tensor | None, norm: Norm | None, activation: GatedActivation,
        quant: RowQuant | None, tiles: LoraTiles | None = None,
    ) -> Tensor | QuantizedRows:  # fmt: skip
        """Do the same, then gate: the first half of the output columns gates the second; then quantize, if asked."""
        fuses = norm is not None and activation == SILU and self._fuses_norm(hidden, norm) and self._fuses_gate()
        if norm is not None and fuses and not self.is_adapted(tiles):
            return self._gemv(_add_residual(hidden, residual), norm=norm.weight, epsilon=norm.epsilon, gated=True)
        gate_up = self.norm_forward(hidden, residual, norm, tiles)
        if quant is not None and gate_up.shape[1] // 2 <= MAX_QUANTIZED_WIDTH:
            return act_and_mul_quantize(gate_up, quant, activation)
        return act_and_mul(gate_up, activation)

    def _fuses_norm(self, hidden: Tensor, norm: Norm) -> bool:
        return self.fuses_gemv and len(hidden) == 1 and norm.weight.dtype == hidden.dtype

    def _fuses_gate(self) -> bool:
        whole_tiles = all(product.weights.rows % (2 * TILE_ROWS) == 0 for product in self.products)
        no_bias = all(layer.bias is None for layer in self.layers)
        return no_bias and whole_tiles and len(self.products) <= 1

    def _norm(self, hidden: Tensor, residual: Tensor | None, norm: Norm) -> Tensor | QuantizedRows:
        if self.quant is not None and hidden.shape[1] <= MAX_QUANTIZED_WIDTH:
            return add_rms_norm_quantize(hidden, residual, norm.weight, norm.epsilon, self.quant)
        return add_rms_norm(hidden, residual, norm.weight, norm.epsilon)

    def forward_add(self, x: Tensor | QuantizedRows, hidden: Tensor, tiles: LoraTiles | None = None) -> Tensor | None:
        """Project x; return what is still to be added to hidden, or None if the kernel has added it."""
        if not self.is_adapted(tiles) and self.fuses_gemv and len(x) == 1 and isinstance(x, Tensor):
            self._gemv(x, residual=hidden)
            return None
        return self.forward(x, tiles)

    def forward(self, x: Tensor | QuantizedRows, tiles: LoraTiles | None = None) -> Tensor:
        """Project x."""
        if self.is_adapted(tiles):
            assert isinstance(x, Tensor)
            return self._adapted(x, tiles)
        return self.project(x)

    def _adapted(self, x: Tensor, tiles: LoraTiles | None) -> Tensor:
        """Project x and add the deltas of the tokens' adapters."""
        assert self.lora is not None and tiles is not None
        lora = self.lora
        shrunk = lora_shrink(x, lora.down, tiles)
        y = self.project(x)
        lora_expand_add(shrunk, lora.up, lora.offsets, lora.out_features, tiles, y)
        return y

    def project(self, x: Tensor | QuantizedRows) -> Tensor:
        """Project x with the kernel that the methods above select, but nothing fused before or after it."""
        return self._gemv(x) if self.fuses_gemv and len(x) == 1 and isinstance(x, Tensor) else self(x)

    def __call__(self, x: Tensor | QuantizedRows) -> Tensor:
        if self.products:
            return self._multiply(x)
        assert isinstance(x, Tensor)
        outputs = [layer(x) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def _multiply(self, x: Tensor | QuantizedRows) -> Tensor:
        if len(self.products) == 1:
            return self.products[0](x, self._biases[0])
        y, parts = self._empty_outputs(len(x))
        for product, bias, part in zip(self.products, self._biases, parts, strict=True):
            product(x, bias, part)
        return y

    def _gemv(self, x: Tensor, **fused: Any) -> Tensor:
        if not self.products:
            layer: Any = self.layers[0]
            return fused_gemv(x, layer.weight, layer.bias, **fused)
        if len(self.products) == 1:
            return hopper_gemv(x, self.products[0].weights, self._biases[0], quant=self.products[0].quant, **fused)
        y, parts = self._empty_outputs(1)
        for product, bias, part in zip(self.products, self._biases, parts, strict=True):
            hopper_gemv(x, product.weights, bias, quant=product.quant, out=part, **fused)
        return y

    def _empty_outputs(self, tokens: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return a matrix for the results of all products, and the columns of each."""
        rows = [product.weights.rows for product in self.products]
        y = torch.empty(tokens, sum(rows), dtype=self.dtype, device=self.products[0].weights.tiles.device)
        return y, y.split(rows, dim=1)


def _move_to_hopper(layers: Sequence[nn.Module], dtype: torch.dtype) -> tuple[list[HopperLinear], list[Tensor | None]]:
    """Rearrange the weights of quantized layers for Hopper's kernels, if this is such a GPU; the layers share them.

    Neighbors with the same scheme become one product. Return the products and their biases.
    """
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if forced_backend() is not None or len(quantized) < len(layers) or not all(map(_is_plain, quantized)):
        return [], []
    # Static scales of inputs differ by layer
    keys = [(layer.scheme, i if layer.scheme.static else 0) for i, layer in enumerate(quantized)]
    prepared: list[tuple[HopperLinear, list[QuantizedLinear]]] = []
    for _, pairs in itertools.groupby(zip(keys, quantized, strict=True), key=lambda pair: pair[0]):
        products = _products_of([layer for _, layer in pairs], dtype)
        if products is None:
            return [], []
        prepared += products
    for product, members in prepared:
        start = 0
        for layer in members:
            layer.move_weights(product, slice(start, start + layer.out_features), "hopper")
            start += layer.out_features
    return [product for product, _ in prepared], [_merged_bias(members, dtype) for _, members in prepared]


def _products_of(
    layers: list[QuantizedLinear], dtype: torch.dtype
) -> list[tuple[HopperLinear, list[QuantizedLinear]]] | None:
    """Prepare layers with the same scheme as one product, or as one each if their rows do not fill tiles; None if the
    kernels do not support one of them."""
    merged = HopperLinear.prepare([layer.packed for layer in layers], layers[0].inputs, dtype)
    if merged is not None:
        return [(merged, layers)]
    if len(layers) == 1:
        return None
    single = [HopperLinear.prepare([layer.packed], layer.inputs, dtype) for layer in layers]
    products = [(product, [layer]) for product, layer in zip(single, layers, strict=True) if product is not None]
    return products if len(products) == len(layers) else None


def _merged_bias(layers: list[QuantizedLinear], dtype: torch.dtype) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    if len(layers) == 1:
        return layers[0].bias
    zeros = [torch.zeros(layer.out_features, dtype=dtype) for layer in layers]
    device = next(layer.bias.device for layer in layers if layer.bias is not None)
    biases = [zero if layer.bias is None else layer.bias for zero, layer in zip(zeros, layers, strict=True)]
    return torch.cat([bias.detach().to(device, dtype) for bias in biases])


def _is_plain(layer: QuantizedLinear) -> bool:
    extras = layer.scheme.rank or layer.scheme.hadamard or layer.round_inputs is not None
    return not layer.moved and not extras


def _add_residual(hidden: Tensor, residual: Tensor | None) -> Tensor:
    return hidden if residual is None else add_rms_norm(hidden, residual, None, 0.0)


def linear_graph(linears: Sequence[FusedLinear], tokens: int, quantize_before: bool) -> Callable[[], None]:
    """Capture linear layers alone in a CUDA graph, to time them; return a call that runs them on `tokens` inputs.

    With `quantize_before` the inputs are quantized outside of the graph if a norm or gate would do it.
    """
    layer: Any = linears[0].layers[0]
    device = next(itertools.chain(layer.parameters(), layer.buffers())).device
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, layer.in_features, generator=generator, device=device).to(linears[0].dtype)
    inputs: Tensor | QuantizedRows = x
    fused = tokens == 1 and linears[0].fuses_gemv  # with the quantization
    if quantize_before and not fused and linears[0].quant is not None and layer.in_features <= MAX_QUANTIZED_WIDTH:
        inputs = add_rms_norm_quantize(x, None, torch.ones_like(x[0]), 1e-6, linears[0].quant)
    for linear in linears:  # compile, and allocate workspaces, before the capture
        linear.project(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for linear in linears:
            linear.project(inputs)
    return partial(_replay, graph, inputs)


def _replay(graph: torch.cuda.CUDAGraph, inputs: Tensor | QuantizedRows) -> None:
    """Replay a graph; the caller's reference keeps its inputs alive."""
    graph.replay()
