"""A decoder as one call of compiled code per step on CPU: no Python between its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from smelt.kernels.attention_metadata import AttentionMetadata, LayerKVPages
from smelt.kernels.cpu import program as compiled
from smelt.kernels.cpu.build import load_library
from smelt.kernels.cpu.kernels import FloatLinear, Int8Linear
from smelt.kernels.cpu.plan import make_linear_plan
from smelt.kernels.cpu.program import Program
from smelt.kernels.kv_quant import KVQuantFormat
from smelt.kernels.linear import select_kernel
from smelt.kernels.paged import MAX_HEAD_DIM, MAX_QUERIES_PER_KV_HEAD
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear
from smelt.runtime import decoder
from smelt.runtime.decoder import Attention, Decoder, FeedForward, Norm, decoder_of, rows_of, stacked


class Layers(Protocol):
    """A KV cache with pages for each layer."""

    def layer(self, index: int) -> LayerKVPages: ...


class CompiledNetwork:
    """Compute the logits of a step with a compiled program."""

    name = "compiled-cpu"

    def __init__(
        self, model: Model, cache: Layers, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        dtype = torch.bfloat16 if model.network.dtype == torch.bfloat16 else torch.float32
        writer = _Writer(decoder_of(model, max_model_len), cache, max_num_batched_tokens, max_num_seqs, dtype)
        self._program, self._logits = writer.written()

    def logits(
        self, ids: Tensor, positions: Tensor, rows: Tensor, pages: AttentionMetadata
    ) -> Tensor:  # [rows, vocabulary]
        self._program.run(ids, positions, rows, pages)
        return self._logits[: len(rows)]


def reason_against(model: Model, kind: str | None = None) -> str | None:
    """Return why a network cannot be compiled, or None if it can. `kind`: the KV cache dtype."""
    library = load_library() if model.device.type == "cpu" else None
    if library is None or not compiled.can_run(library):
        return "there is no compiled library for this device"
    if (reason := decoder.reason_against(model)) is not None:
        return reason
    for part in model.anatomy.parts:
        if part.kind == "heads" and (part.head_dim > MAX_HEAD_DIM or part.heads_per_unit > MAX_QUERIES_PER_KV_HEAD):
            return "its head_dim is too large"
        if (
            part.kind == "heads"
            and kind is not None
            and not KVQuantFormat.for_head_dim(kind, part.head_dim).is_simd_aligned
        ):
            return "its head_dim is too small for this KV cache dtype"
        for projection in (*part.input_projections, part.output):
            if not _multiplies(projection.module):
                return f"{projection.path} is a layer without a compiled kernel"
    head = model.network.get_output_embeddings()
    return None if _multiplies(head) else "the LM head is a layer without a compiled kernel"


def _multiplies(layer: nn.Module) -> bool:
    """Return whether the library has a kernel for a layer, including the quantization of its activations."""
    if not isinstance(layer, QuantizedLinear):
        return type(layer) is nn.Linear
    kernel = select_kernel(layer.packed, layer.inputs, torch.float32)
    expected = FloatLinear if layer.inputs is None else Int8Linear
    return isinstance(kernel, expected) and not layer.scheme.hadamard and not layer.scheme.rank


class _Writer:
    """Emit the operations of a network, with buffers for the largest step."""

    def __init__(
        self, network: Decoder, cache: Layers, max_num_batched_tokens: int, max_num_seqs: int, kind: torch.dtype
    ) -> None:
        self.decoder, self.cache = network, cache
        self.max_num_batched_tokens, self.max_num_seqs, self.type = max_num_batched_tokens, max_num_seqs, kind
        self.program = Program(load_library())
        self._buffers: dict[str, Tensor] = {}

    def written(self) -> tuple[Program, Tensor]:
        """Return the program and its logits buffer."""
        table, width = self.decoder.table, self.decoder.width
        hidden = torch.empty(self.max_num_batched_tokens, width)
        self.program.add(compiled.EMBED, weight=table, weight_type=table.dtype, y=hidden, width=width)
        residual: Tensor | None = None  # output of the previous part, not yet added to hidden
        for part in self.decoder.parts:
            normed = self._buffer("normed", width)
            self._norm(part.norm, hidden, residual, normed)
            inner = self._attention(part, normed) if isinstance(part, Attention) else self._feed_forward(part, normed)
            residual = self._buffer("given", width)
            self._product(part.output, inner, residual)
        self._norm(self.decoder.norm, hidden, residual, None)
        return self.program, self._head(hidden)

    def _head(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits of the tokens that need them, [max_num_seqs, vocabulary]."""
        width = hidden.shape[1]
        selected = torch.empty(self.max_num_seqs, width)
        normed = torch.empty(self.max_num_seqs, width, dtype=self._head_type())
        self.program.add(compiled.PICK, x=hidden, y=selected, width=width)
        self._norm(self.decoder.norm, selected, None, normed, count=compiled.LOGITS_TOKENS_ONLY)
        logits = torch.empty(self.max_num_seqs, rows_of(self.decoder.head))
        self._product(self.decoder.head, normed, logits, count=compiled.LOGITS_TOKENS_ONLY)
        return logits

    def _head_type(self) -> torch.dtype:
        """Return the dtype of the head's inputs: a packed kernel has float32 outputs only for float32 inputs."""
        return torch.float32 if isinstance(self.decoder.head, QuantizedLinear) else self.type

    def _norm(self, norm: Norm, hidden: Tensor, given: Tensor | None, y: Tensor | None, count: int = 0) -> None:
        """Add `given`, the previous part's output, to hidden in place, then norm the sum into y, if there is one."""
        self.program.add(
            compiled.ADD_NORM, x=hidden, other=given, y=y, weight=norm.weight, weight_type=norm.weight.dtype,
            type=self.type if y is None else y.dtype, width=hidden.shape[1], epsilon=norm.epsilon, count=count,
        )  # fmt: skip

    def _attention(self, part: Attention, normed: Tensor) -> Tensor:
        (queries, keys, values), strides = self._products(part.writers, normed)
        pages = self.cache.layer(part.index)
        for tensor, stride, count, norm in (
            (queries, strides[0], part.heads, part.query_norm),
            (keys, strides[1], part.kv_heads, part.key_norm),
        ):
            operand = {"x": tensor, "y": tensor, "type": self.type, "x_stride": stride, "count": count}
            if norm is not None:
                weight = {"weight": norm.weight, "weight_type": norm.weight.dtype, "epsilon": norm.epsilon}
                self.program.add(compiled.HEAD_NORM, **operand, **weight, width=part.width)
            rope = {"weight": self.decoder.cosines, "other": self.decoder.sines}
            self.program.add(compiled.ROTATE, **operand, **rope, width=part.width)
            if pages.kv_quant is not None and pages.kv_quant.hadamard:
                self.program.add(compiled.HADAMARD, **operand, width=part.width)
        y = self._buffer("mixed", part.heads * part.width)
        attention = self.program.attention(
            queries, strides[0], pages, y, heads=part.heads, scale=part.scale, window=part.window
        )
        for tensor, stride, page in ((keys, strides[1], pages.keys), (values, strides[2], pages.values)):
            self.program.add(
                compiled.WRITE, x=tensor, type=self.type, x_stride=stride, y=page, weight_type=attention.page_type,
                width=part.kv_heads * part.width, detail=attention,
            )  # fmt: skip
        self.program.add(compiled.ATTEND, detail=attention)
        return y

    def _feed_forward(self, part: FeedForward, normed: Tensor) -> Tensor:
        (gate, up), strides = self._products((part.gate, part.up), normed)
        y = self._buffer("gated", part.width)
        self.program.add(compiled.GATE, x=gate, other=up, y=y, type=self.type, x_stride=strides[0], width=part.width)
        return y

    def _products(self, layers: Sequence[nn.Module], x: Tensor) -> tuple[list[Tensor], list[int]]:
        """Apply layers that share an input; return their outputs and the stride between tokens of each."""
        sizes = [rows_of(layer) for layer in layers]
        merged = stacked(layers)
        if merged is None:
            outputs = [self._buffer(f"separate {index} of {len(layers)}", size) for index, size in enumerate(sizes)]
            for layer, y in zip(layers, outputs, strict=True):
                self._product(layer, x, y)
            return outputs, sizes
        output = self._buffer(f"merged {len(layers)}", sum(sizes))
        self._product(merged, x, output)
        offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        return [output.view(-1)[offset:] for offset in offsets], [sum(sizes)] * len(sizes)

    def _product(self, layer: nn.Module, x: Tensor, y: Tensor, count: int = 0) -> None:
        bias: Tensor | None = layer.bias  # type: ignore[assignment]
        self.program.keep(layer)
        if not isinstance(layer, QuantizedLinear):
            self.program.dense(layer.weight.detach(), bias, x, y, count)  # type: ignore[operator]
            return
        packed = layer.packed
        plan = make_linear_plan(packed.format, packed.rows, packed.columns, packed.tensors, layer.inputs, x.dtype)
        if bias is not None:
            plan.bias, plan.bias_type = bias.data_ptr(), compiled.DTYPE_CODES[bias.dtype]
        self.program.packed(plan, x, y, count)

    def _buffer(self, name: str, width: int) -> Tensor:
        """Return a buffer [max_num_batched_tokens, width] by name; layers reuse it."""
        key = f"{name} {width}"
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self.max_num_batched_tokens, width, dtype=self.type)
        return self._buffers[key]
