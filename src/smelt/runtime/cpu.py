"""A decoder as one call of compiled code per step on CPU: no Python between its layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from smelt.kernels.attention_metadata import AttentionMetadata, LayerKVPages
from smelt.kernels.cpu import program as compiled
from smelt.kernels.cpu.build import load_library
from smelt.kernels.cpu.kernels import FloatLinear, Int8Linear
from smelt.kernels.cpu.plan import DTYPE_CODES, make_linear_plan
from smelt.kernels.cpu.program import Program
from smelt.kernels.gated_activation import GatedActivation
from smelt.kernels.kv_quant import KVQuantFormat
from smelt.kernels.linear import select_kernel
from smelt.kernels.paged import MAX_HEAD_DIM, MAX_QUERIES_PER_KV_HEAD
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear
from smelt.runtime import decoder
from smelt.runtime.decoder import (
    Attention,
    CarvedExperts,
    Decoder,
    ExpertLayers,
    FeedForward,
    MixtureOfExperts,
    Norm,
    build_decoder,
    merge_linears,
)

_NOT_CHOSEN = -1e9  # router logit of an expert whose probability must be 0


class LayeredCache(Protocol):
    """A KV cache with pages for each layer."""

    def layer(self, index: int) -> LayerKVPages: ...


class CompiledNetwork:
    """Compute the logits of a step with a compiled program."""

    name = "compiled-cpu"

    def __init__(
        self, model: Model, cache: LayeredCache, max_num_batched_tokens: int, max_num_logits: int, max_model_len: int
    ) -> None:
        dtype = torch.bfloat16 if model.network.dtype == torch.bfloat16 else torch.float32
        builder = _ProgramBuilder(
            build_decoder(model, max_model_len), cache, max_num_batched_tokens, max_num_logits, dtype
        )
        self._program, self._logits = builder.build()
        self._carved_logits = builder.carved_logits

    def set_experts(self, experts: Tensor) -> None:
        """Set the experts [tokens] of carved feed-forwards for the next step."""
        assert self._carved_logits is not None
        logits = self._carved_logits[: len(experts)]
        logits.fill_(_NOT_CHOSEN).scatter_(1, experts[:, None], 0.0)

    def logits(
        self, ids: Tensor, positions: Tensor, rows: Tensor, metadata: AttentionMetadata
    ) -> Tensor:  # [rows, vocabulary]
        self._program.run(ids, positions, rows, metadata)
        return self._logits[: len(rows)]


def unsupported_reason(model: Model, kv_cache_dtype: str | None = None) -> str | None:
    """Return why a network cannot be compiled, or None if it can."""
    library = load_library() if model.device.type == "cpu" else None
    if library is None or not compiled.can_run(library):
        return "there is no compiled library for this device"
    if (reason := decoder.unsupported_reason(model, carved_experts=True)) is not None:
        return reason
    for part in model.anatomy.parts:
        if part.clipped:
            return "its Q, K and V are clipped"
        if part.kind == "heads" and (part.head_dim > MAX_HEAD_DIM or part.heads_per_unit > MAX_QUERIES_PER_KV_HEAD):
            return "its head_dim is too large"
        if (
            part.kind == "heads"
            and kv_cache_dtype is not None
            and not KVQuantFormat.for_head_dim(kv_cache_dtype, part.head_dim).is_simd_aligned
        ):
            return "its head_dim is too small for this KV cache dtype"
        for projection in (*part.input_projections, part.output):
            if not has_kernel(projection.module):
                return f"{projection.path} is a layer without a compiled kernel"
    head = model.network.get_output_embeddings()
    return None if has_kernel(head) else "the LM head is a layer without a compiled kernel"


def has_kernel(layer: nn.Module) -> bool:
    """Return whether the library has a kernel for a layer, including the quantization of its activations."""
    if not isinstance(layer, QuantizedLinear):
        return type(layer) is nn.Linear
    kernel = select_kernel(layer.packed, layer.inputs, torch.float32)
    expected = FloatLinear if layer.inputs is None else Int8Linear
    return isinstance(kernel, expected) and not layer.scheme.hadamard and not layer.scheme.rank


def _out_features(layer: Any) -> int:
    return int(layer.out_features)


def _in_features(layer: Any) -> int:
    return int(layer.in_features)


class _LinearBuilder:
    """Emit linear layers, with buffers for the largest step."""

    def __init__(self, max_num_batched_tokens: int, dtype: torch.dtype) -> None:
        self.max_num_batched_tokens, self.dtype = max_num_batched_tokens, dtype
        self.program = Program(load_library())
        self._buffers: dict[str, Tensor] = {}

    def linears(
        self, layers: Sequence[nn.Module], x: Tensor, sizes: Sequence[int] = (), name: str = ""
    ) -> tuple[list[Tensor], list[int]]:
        """Apply layers that share an input; return their outputs and the stride between tokens of each.

        `sizes` are the widths of the outputs, if one layer has several. Calls with the same name reuse the buffers.
        """
        widths = [_out_features(layer) for layer in layers]
        merged = layers[0] if len(layers) == 1 else merge_linears(layers)
        if merged is None:
            outputs = [
                self._buffer(f"{name}separate {index} of {len(layers)}", size) for index, size in enumerate(widths)
            ]
            for layer, y in zip(layers, outputs, strict=True):
                self._linear(layer, x, y)
            return outputs, widths
        output = self._buffer(f"{name}merged {len(layers)}", sum(widths))
        self._linear(merged, x, output)
        offsets = itertools.accumulate([0, *(sizes or widths)[:-1]])
        outputs = [output.view(-1)[offset:] for offset in offsets]
        return outputs, [sum(widths)] * len(outputs)

    def _linear(self, layer: nn.Module, x: Tensor, y: Tensor, count: int = 0) -> None:
        bias: Tensor | None = layer.bias  # type: ignore[assignment]
        self.program.keep_alive(layer)
        if not isinstance(layer, QuantizedLinear):
            self.program.dense(layer.weight.detach(), bias, x, y, count)  # type: ignore[operator]
            return
        packed = layer.packed
        plan = make_linear_plan(packed.format, packed.rows, packed.columns, packed.tensors, layer.inputs, x.dtype)
        if bias is not None:
            plan.bias, plan.bias_type = bias.data_ptr(), DTYPE_CODES[bias.dtype]
        self.program.packed(plan, x, y, count)

    def _buffer(self, name: str, width: int) -> Tensor:
        """Return a buffer [max_num_batched_tokens, width] by name; layers reuse it."""
        return self._typed_buffer(name, width, self.dtype)

    def _float_buffer(self, name: str, width: int) -> Tensor:
        return self._typed_buffer(name, width, torch.float32)

    def _typed_buffer(self, name: str, width: int, dtype: torch.dtype) -> Tensor:
        key = f"{name} {width}"
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self.max_num_batched_tokens, width, dtype=dtype)
        return self._buffers[key]


class _ProgramBuilder(_LinearBuilder):
    """Emit the operations of a network."""

    def __init__(
        self, network: Decoder, cache: LayeredCache, max_num_batched_tokens: int, max_num_logits: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(max_num_batched_tokens, dtype)
        self.decoder, self.cache, self.max_num_logits = network, cache, max_num_logits
        parts = [part for part in network.parts if isinstance(part, Attention)]
        self._leaders = {part.map_of for part in parts if part.map_of is not None}  # layers whose map others use
        self.carved_logits: Tensor | None = None  # [tokens, experts] of carved feed-forwards, which the caller fills in
        self._queries: dict[int, tuple[Tensor, int]] = {}  # of these layers, after RoPE, and the stride between tokens

    def build(self) -> tuple[Program, Tensor]:
        """Return the program and its logits buffer."""
        embedding, width = self.decoder.embedding, self.decoder.hidden_size
        hidden = torch.empty(self.max_num_batched_tokens, width)
        self.program.add(
            compiled.EMBED, weight=embedding, weight_type=embedding.dtype, y=hidden, width=width,
            scale=self.decoder.embedding_scale,
        )  # fmt: skip
        residual: _Residual | None = None  # output of the previous part, not yet added to hidden
        for part in self.decoder.parts:
            normed = self._buffer("normed", width)
            if isinstance(part, MixtureOfExperts):
                self._norm(part.norm, hidden, residual, normed)
                self._mixture(part, normed, hidden)
                residual = None
                continue
            carved = part if isinstance(part, CarvedExperts) else None
            part = part.shared if isinstance(part, CarvedExperts) else part
            self._norm(part.norm, hidden, residual, normed)
            if carved is not None:
                self._carved(carved, normed, hidden)
            inner = self._attention(part, normed) if isinstance(part, Attention) else self._feed_forward(part, normed)
            output = self._buffer("residual", width)
            self._linear(part.output, inner, output)
            if part.post_norm is not None:
                self._norm_in_place(part.post_norm, output, width, 1, width)
            residual = _Residual(output, part.residual_scale)
        if residual is not None:
            self._norm(None, hidden, residual, None)
        return self.program, self._lm_head(hidden)

    def _lm_head(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits of the tokens that need them, [max_num_logits, vocabulary]."""
        width = hidden.shape[1]
        selected = torch.empty(self.max_num_logits, width)
        normed = torch.empty(self.max_num_logits, width, dtype=self._lm_head_dtype())
        self.program.add(compiled.GATHER_ROWS, x=hidden, y=selected, width=width)
        self._norm(self.decoder.final_norm, selected, None, normed, count=compiled.LOGITS_TOKENS_ONLY)
        logits = torch.empty(self.max_num_logits, _out_features(self.decoder.lm_head))
        self._linear(self.decoder.lm_head, normed, logits, count=compiled.LOGITS_TOKENS_ONLY)
        return logits

    def _lm_head_dtype(self) -> torch.dtype:
        """Return the dtype of the head's inputs: a packed kernel has float32 outputs only for float32 inputs."""
        return torch.float32 if isinstance(self.decoder.lm_head, QuantizedLinear) else self.dtype

    def _norm(
        self, norm: Norm | None, hidden: Tensor, residual: _Residual | None, y: Tensor | None, count: int = 0
    ) -> None:
        """Add the previous part's output to hidden in place, then norm the sum into y, if there is one."""
        added = {} if residual is None else {"other": residual.output, "scale": residual.scale}
        self.program.add(
            compiled.ADD_RMS_NORM, x=hidden, y=y, dtype=self.dtype if y is None else y.dtype, width=hidden.shape[1],
            count=count, **added, **_norm_fields(norm),
        )  # fmt: skip

    def _norm_in_place(self, norm: Norm, x: Tensor, stride: int, count: int, width: int) -> None:
        """Normalize `count` groups of `width` values of each token."""
        self.program.add(
            compiled.RMS_NORM, x=x, y=x, dtype=self.dtype, x_stride=stride, count=count, width=width,
            **_norm_fields(norm),
        )  # fmt: skip

    def _attention(self, part: Attention, normed: Tensor) -> Tensor:
        if part.map_of is not None:
            (values,), (stride,) = self.linears(part.input_projections, normed, part.input_sizes)
            if self._is_rotated(part):
                self._hadamard(values, stride, part.num_kv_heads, part.head_dim)
            return self._attend(
                part, *self._queries[part.map_of], ((values, stride, self.cache.layer(part.layer).values),)
            )
        own_buffers = f"layer {part.layer}, " if part.layer in self._leaders else ""
        (queries, keys, values), strides = self.linears(part.input_projections, normed, part.input_sizes, own_buffers)
        pages = self.cache.layer(part.layer)
        rotary = compiled.RotaryStruct(
            part.rotary.cosines.data_ptr(), part.rotary.sines.data_ptr(), part.rotary.rotary_dim,
            part.rotary.interleaved,
        )  # fmt: skip
        self.program.keep_alive(part.rotary)
        for tensor, stride, heads, norm in (
            (queries, strides[0], part.num_heads, part.query_norm),
            (keys, strides[1], part.num_kv_heads, part.key_norm),
        ):
            if norm is not None:
                count = 1 if part.joint_norms else heads
                self._norm_in_place(norm, tensor, stride, count, heads * part.head_dim // count)
            self.program.add(
                compiled.ROPE, params=rotary, x=tensor, y=tensor, dtype=self.dtype, x_stride=stride, count=heads,
                width=part.head_dim,
            )  # fmt: skip
        counts = (part.num_heads, part.num_kv_heads, part.num_kv_heads)
        for tensor, stride, count in zip((queries, keys, values), strides, counts, strict=True):
            if self._is_rotated(part):
                self._hadamard(tensor, stride, count, part.head_dim)
        if part.layer in self._leaders:
            self._queries[part.layer] = queries, strides[0]
        stored = ((keys, strides[1], pages.keys), (values, strides[2], pages.values))
        return self._attend(part, queries, strides[0], stored)

    def _attend(
        self, part: Attention, queries: Tensor, query_stride: int, stored: Sequence[tuple[Tensor, int, Tensor]]
    ) -> Tensor:
        """Store rows of the KV cache, (rows, stride between tokens, pages) each, and attend to all of them."""
        y = self._buffer("attention", part.num_heads * part.head_dim)
        attention = self.program.attention(
            queries, query_stride, self.cache.layer(part.layer), y, heads=part.num_heads, scale=part.scale,
            window=part.window, sinks=part.sinks,
        )  # fmt: skip
        for tensor, stride, page in stored:
            self.program.add(
                compiled.STORE_KV, x=tensor, dtype=self.dtype, x_stride=stride, y=page, weight_type=attention.page_type,
                width=part.num_kv_heads * part.head_dim, params=attention,
            )  # fmt: skip
        self.program.add(compiled.ATTENTION, params=attention)
        if self._is_rotated(part):  # back: the matrix is symmetric
            self._hadamard(y, part.num_heads * part.head_dim, part.num_heads, part.head_dim)
        return y

    def _is_rotated(self, part: Attention) -> bool:
        """Return whether the rows of a layer's KV cache are rotated by a Hadamard matrix."""
        kv_quant = self.cache.layer(part.layer).kv_quant
        return kv_quant is not None and kv_quant.hadamard

    def _hadamard(self, x: Tensor, stride: int, heads: int, head_dim: int) -> None:
        """Rotate heads in place."""
        self.program.add(compiled.HADAMARD, x=x, y=x, dtype=self.dtype, x_stride=stride, count=heads, width=head_dim)

    def _feed_forward(self, part: FeedForward, normed: Tensor) -> Tensor:
        return self._gated(part.input_projections, normed, part.activation, part.input_sizes)

    def _gated(
        self, layers: Sequence[nn.Module], x: Tensor, activation: GatedActivation, sizes: tuple[int, int]
    ) -> Tensor:
        (gate, up), strides = self.linears(layers, x, sizes)
        y = self._buffer("gated", sizes[0])
        self.program.act_and_mul(activation, gate, up, strides[0], y, sizes[0])
        return y

    def _mixture(self, part: MixtureOfExperts, normed: Tensor, hidden: Tensor) -> None:
        """Add the outputs of the experts that a router chooses to hidden."""
        logits = self._float_buffer("router logits", len(part.experts))
        self.program.dense(part.router, part.router_bias, normed, logits)
        fields = {"top_k": part.top_k, "normalize": part.normalize, "router_logits": logits}
        self._experts(part.experts, part.activation, fields, normed, hidden)

    def _carved(self, part: CarvedExperts, normed: Tensor, hidden: Tensor) -> None:
        """Add the outputs of the experts that are set before the step to hidden."""
        self.carved_logits = self._float_buffer("carved logits", len(part.experts))
        fields = {"top_k": 1, "normalize": True, "router_logits": self.carved_logits}
        self._experts(part.experts, part.shared.activation, fields, normed, hidden)

    def _experts(
        self, experts: Sequence[ExpertLayers], activation: GatedActivation, fields: dict[str, Any], normed: Tensor,
        hidden: Tensor,
    ) -> None:  # fmt: skip
        width = hidden.shape[1]
        inputs, outputs = self._buffer("expert inputs", width), self._buffer("expert outputs", width)
        operations = []
        for expert in experts:
            with self.program.collect() as collected:
                channels = _out_features(expert.gate)
                inner = self._gated((expert.gate, expert.up), inputs, activation, (channels, channels))
                self._linear(expert.output, inner, outputs)
            operations.append(collected)
        fields = {**fields, "inputs": inputs, "outputs": outputs}
        self.program.experts(operations, fields, x=normed, y=hidden, dtype=self.dtype, width=width)


@dataclass(frozen=True)
class _Residual:
    """An output to be added to the hidden states."""

    output: Tensor
    scale: float


def _norm_fields(norm: Norm | None) -> dict[str, Any]:
    if norm is None:
        return {}
    return {"weight": norm.weight, "weight_type": norm.weight.dtype, "epsilon": norm.epsilon}


def linear_program(groups: Sequence[Sequence[nn.Module]], tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """Compile linear layers alone, to time them; return a call that runs them on `tokens` inputs.

    The layers of a group share an input and are merged as in a network.
    """
    builder = _LinearBuilder(tokens, dtype)
    x = torch.randn(tokens, _in_features(groups[0][0]), generator=torch.Generator().manual_seed(0)).to(dtype)
    for layers in groups:
        builder.linears(layers, x)
    ids, none = torch.zeros(tokens, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
    metadata = AttentionMetadata(none[0], none[0], none, ids)  # linear layers read none of it
    return partial(builder.program.run, ids, ids, ids[:0], metadata)
