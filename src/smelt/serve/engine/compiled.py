"""The network as one call of compiled code a step, for processors: no Python between its layers.

Llama and its kin are written down as a list of operations over the very tensors of the network, quantised or not,
pruned or not. Whatever is not known to be such a network runs as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smelt.kernels.cpu import program as compiled
from smelt.kernels.cpu.build import load_library
from smelt.kernels.cpu.kernels import FloatInputs, IntegerInputs
from smelt.kernels.cpu.plan import make_plan
from smelt.kernels.cpu.program import Program
from smelt.kernels.linear import LinearKernel, choose
from smelt.kernels.paged import Pages
from smelt.models.anatomy import Anatomy, Block, Part
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.format import TENSOR
from smelt.serve.engine.attention import PagedCache

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # RMS norms before, rotary halves, silu gates, nothing else


class CompiledNetwork:
    """`logits` of a step, by a program."""

    name = "cpu-program"

    def __init__(self, model: Model, cache: PagedCache, most_tokens: int, most_wanted: int, context: int) -> None:
        self._program, self._logits = _Writer(model, cache, most_tokens, most_wanted, context).written()

    def logits(self, ids: Tensor, positions: Tensor, rows: Tensor, pages: Pages) -> Tensor:  # [rows, vocabulary]
        self._program.run(ids, positions, rows, pages)
        return self._logits[: len(rows)]


def compiled_network(
    model: Model, cache: PagedCache, most_tokens: int, most_wanted: int, context: int
) -> CompiledNetwork | None:
    """The program of a network, or None where it has to run as it is."""
    if reason_against(model) is not None:
        return None
    return CompiledNetwork(model, cache, most_tokens, most_wanted, context)


def reason_against(model: Model) -> str | None:
    """Why a network is not compiled; None where it is."""
    config, anatomy = model.network.config, model.anatomy
    library = load_library() if model.device.type == "cpu" else None
    if library is None or not compiled.can_run(library):
        return "there is no compiled library for this device"
    if config.model_type not in FAMILIES or config.hidden_act not in ("silu", "swish"):
        return f"{config.model_type} is not written as a program"
    if model.network.model.rotary_emb.rope_type not in ("default", "llama3", "linear", "yarn"):
        return "its rotary positions change with the length"
    if any(not part.units for part in anatomy.parts):
        return "a layer lost all of its heads or filters"
    heads = [part for part in anatomy.parts if part.kind == "heads"]
    if any(part.head_dim > compiled.MOST_WIDTH or part.group > compiled.MOST_GROUP for part in heads):
        return "its heads are too wide"
    for part in anatomy.parts:
        for projection in (*part.writers, part.output):
            if not _multiplies(projection.module):
                return f"{projection.path} is of a kind that has no compiled product"
    return None


def _multiplies(layer: nn.Module) -> bool:
    if isinstance(layer, QuantizedLinear):
        return not layer.scheme.hadamard and not layer.scheme.rank and _kernel(layer) is not None
    return isinstance(layer, nn.Linear)


def _kernel(layer: QuantizedLinear) -> LinearKernel | None:
    """What computes a packed layer, if it is the compiled library and rounds the inputs itself."""
    kernel = choose(layer.packed, layer.inputs, torch.float32)
    if layer.inputs is None:
        return kernel if isinstance(kernel, FloatInputs) else None
    return kernel if isinstance(kernel, IntegerInputs) else None


class _Writer:
    """Writes the operations of a network, with buffers for the largest step."""

    def __init__(self, model: Model, cache: PagedCache, most_tokens: int, most_wanted: int, context: int) -> None:
        self.network: Any = model.network
        self.anatomy: Anatomy = model.anatomy
        self.cache, self.most_tokens, self.most_wanted = cache, most_tokens, most_wanted
        self.program = Program(load_library())
        self.type = torch.bfloat16 if model.network.dtype == torch.bfloat16 else torch.float32
        self.cosines, self.sines = _rotations(self.network, context)
        self._buffers: dict[str, Tensor] = {}

    def written(self) -> tuple[Program, Tensor]:
        """The program, and where its logits are."""
        table = self.network.get_input_embeddings().weight
        width = table.shape[1]
        hidden = torch.empty(self.most_tokens, width)
        self.program.add(compiled.EMBED, weight=table, weight_type=table.dtype, y=hidden, width=width)
        given: Tensor | None = None  # by the layer before, not added yet
        for block in self.anatomy.blocks:
            given = self._block(block, hidden, given)
        self._norm(self.anatomy.final_norm, hidden, given, None)
        picked, normed = torch.empty(self.most_wanted, width), torch.empty(self.most_wanted, width)
        self.program.add(compiled.PICK, x=hidden, y=picked, width=width)
        self._norm(self.anatomy.final_norm, picked, None, normed, count=compiled.FOR_WANTED)
        head = self.network.get_output_embeddings()
        logits = torch.empty(self.most_wanted, head.weight.shape[0])
        self.program.dense(head.weight.detach(), head.bias, normed, logits, compiled.FOR_WANTED)
        return self.program, logits

    def _block(self, block: Block, hidden: Tensor, given: Tensor | None) -> Tensor:
        for part in block.parts:
            normed = self._buffer("normed", hidden.shape[1])
            self._norm(part.feeder, hidden, given, normed)
            mixed = self._attention(block, part, normed) if part.kind == "heads" else self._feed_forward(part, normed)
            given = self._buffer("given", hidden.shape[1])
            self._product(part.output.module, mixed, given)
        assert given is not None
        return given

    def _norm(self, module: Any, hidden: Tensor, given: Tensor | None, y: Tensor | None, count: int = 0) -> None:
        """Add what the last layer gave, then the norm of the sum (without y: only the sum)."""
        self.program.add(
            compiled.ADD_NORM, x=hidden, other=given, y=y, weight=module.weight, weight_type=module.weight.dtype,
            type=self.type if y is None else y.dtype, width=hidden.shape[1], epsilon=module.variance_epsilon,
            count=count,
        )  # fmt: skip

    def _attention(self, block: Block, part: Part, normed: Tensor) -> Tensor:
        holder, layer = part.holder, part.block
        width, heads, kv_heads = part.head_dim, part.units * part.group, part.units
        (queries, keys, values), strides = self._products([each.module for each in part.writers], normed)
        for tensor, stride, count, norm in (
            (queries, strides[0], heads, getattr(holder, "q_norm", None)),
            (keys, strides[1], kv_heads, getattr(holder, "k_norm", None)),
        ):
            place = {"x": tensor, "y": tensor, "type": self.type, "x_stride": stride, "count": count, "width": width}
            if norm is not None:
                weight = {"weight": norm.weight, "weight_type": norm.weight.dtype, "epsilon": norm.variance_epsilon}
                self.program.add(compiled.HEAD_NORM, **place, **weight)
            self.program.add(compiled.ROTATE, **place, weight=self.cosines, other=self.sines)
        pages = self.cache.keys[layer], self.cache.values[layer]
        for tensor, stride, page in ((keys, strides[1], pages[0]), (values, strides[2], pages[1])):
            self.program.add(
                compiled.WRITE, x=tensor, type=self.type, x_stride=stride, y=page, weight_type=page.dtype,
                width=kv_heads * width,
            )  # fmt: skip
        mixed = self._buffer("mixed", heads * width)
        self.program.attend(
            queries, strides[0], *pages, mixed, heads=heads, scale=holder.scaling, window=_window(self.network, holder)
        )
        return mixed

    def _feed_forward(self, part: Part, normed: Tensor) -> Tensor:
        up, gate = (each.module for each in part.writers)
        (first, second), strides = self._products([gate, up], normed)
        if strides[0] != strides[1]:
            raise AssertionError("gate and up have the same width")
        y = self._buffer("gated", part.units)
        self.program.add(
            compiled.GATE, x=first, other=second, y=y, type=self.type, x_stride=strides[0], width=part.units
        )
        return y

    def _products(self, layers: Sequence[nn.Module], x: Tensor) -> tuple[list[Tensor], list[int]]:
        """What layers with one input give: where each lies, and how far its tokens are apart."""
        sizes = [_rows(layer) for layer in layers]
        stacked = _stacked(layers)
        if stacked is None:
            each = [self._buffer(f"apart {place} of {len(layers)}", size) for place, size in enumerate(sizes)]
            for layer, y in zip(layers, each, strict=True):
                self._product(layer, x, y)
            return each, sizes
        whole = self._buffer(f"together {len(layers)}", sum(sizes))
        self._product(stacked, x, whole)
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        return [whole.view(-1)[start:] for start in starts], [sum(sizes)] * len(sizes)

    def _product(self, layer: nn.Module, x: Tensor, y: Tensor) -> None:
        bias: Tensor | None = layer.bias  # type: ignore[assignment]
        if not isinstance(layer, QuantizedLinear):
            self.program.dense(layer.weight.detach(), bias, x, y)  # type: ignore[operator]
            return
        packed, inputs = layer.packed, layer.inputs
        plan = make_plan(packed.format, packed.rows, packed.columns, packed.tensors, inputs, self.type)
        if bias is not None:
            plan.bias, plan.bias_type = bias.data_ptr(), compiled.NUMBERS[bias.dtype]
        self.program.keep(layer)
        self.program.packed(plan, x, y)

    def _buffer(self, name: str, width: int) -> Tensor:
        """A buffer by name: layers use it one after the other. [most tokens, width]"""
        key = f"{name} {width}"
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self.most_tokens, width, dtype=self.type)
        return self._buffers[key]


def _rows(layer: nn.Module) -> int:
    return int(layer.out_features)  # type: ignore[arg-type]


def _stacked(layers: Sequence[nn.Module]) -> nn.Module | None:
    """One layer whose rows are those of several, which from now on are views of it; None where they do not fit."""
    if all(isinstance(layer, QuantizedLinear) for layer in layers):
        return _stacked_packed([layer for layer in layers if isinstance(layer, QuantizedLinear)])
    return None


def _stacked_packed(layers: list[QuantizedLinear]) -> QuantizedLinear | None:
    first = layers[0]
    same = all(layer.scheme == first.scheme and layer.bias is None for layer in layers)
    if not same or first.scheme.static or first.scheme.weight.group == TENSOR or "tensor" in first.packed.tensors:
        return None
    rows = [layer.out_features for layer in layers]
    whole = QuantizedLinear(first.in_features, sum(rows), first.scheme, bias=False, dtype=torch.float32)
    for name in first.packed.tensors:
        together = torch.cat([getattr(layer, name) for layer in layers])
        setattr(whole, name, together)
        for layer, part in zip(layers, together.split(rows), strict=True):
            setattr(layer, name, part)
    return whole


def _window(network: Any, attention: Any) -> int | None:
    if network.config.model_type == "mistral":
        found = network.config.sliding_window
    else:
        found = getattr(attention, "sliding_window", None)
    return None if found is None else int(found)


def _rotations(network: Any, context: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, [context, head size] each, in float32."""
    positions = torch.arange(context)[None]
    cosines, sines = network.model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
    return cosines[0].float().contiguous(), sines[0].float().contiguous()
