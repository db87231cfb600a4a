"""The structure of Llama-like decoders for the compiled paths: the parts of each layer in execution order.

A compiled path computes the same function from the same tensors, quantized or not, pruned or not. Any other network
runs eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.models.anatomy import Block, Part
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.format import PER_TENSOR

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # pre-RMSNorm, half-split RoPE, SiLU gates, nothing else
ROTATIONS = ("default", "linear", "llama3", "yarn")  # RoPE types that do not depend on the sequence length


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        return cls(module.weight.detach(), float(module.variance_epsilon))


@dataclass(frozen=True)
class Attention:
    index: int  # of the layer in the KV cache
    norm: Norm
    writers: tuple[nn.Module, nn.Module, nn.Module]  # queries, keys, values
    output: nn.Module
    heads: int
    kv_heads: int
    width: int  # head_dim
    scale: float
    window: int | None
    query_norm: Norm | None = None  # per head
    key_norm: Norm | None = None


@dataclass(frozen=True)
class FeedForward:
    norm: Norm
    gate: nn.Module
    up: nn.Module
    output: nn.Module
    width: int


@dataclass(frozen=True)
class Decoder:
    """`parts` in execution order; `cosines` and `sines` are the RoPE tables of all positions."""

    table: Tensor  # [vocabulary, hidden size]
    parts: tuple[Attention | FeedForward, ...]
    norm: Norm
    head: nn.Module
    cosines: Tensor  # [positions, head_dim], float32
    sines: Tensor

    @property
    def width(self) -> int:
        return int(self.table.shape[1])


def reason_against(model: Model) -> str | None:
    """Return why a network has no such structure, or None if it has."""
    config = model.network.config
    if config.model_type not in FAMILIES or config.hidden_act not in ("silu", "swish"):
        return f"{config.model_type} is not among {', '.join(FAMILIES)}"
    if model.network.model.rotary_emb.rope_type not in ROTATIONS:
        return "its RoPE depends on the sequence length"
    if any(not part.units for part in model.anatomy.parts):
        return "a layer lost all of its heads or channels"
    return None


def decoder_of(model: Model, context: int) -> Decoder:
    """Return the structure of a supported network, with RoPE tables for `context` positions."""
    network: Any = model.network
    anatomy = model.anatomy
    assert anatomy.final_norm is not None
    positions = torch.arange(context, device=model.device)[None]
    cosines, sines = network.model.rotary_emb(torch.zeros(1, device=model.device), positions)
    return Decoder(
        table=network.get_input_embeddings().weight.detach(),
        parts=tuple(_part(network, block, part) for block in anatomy.blocks for part in block.parts),
        norm=Norm.of(anatomy.final_norm),
        head=network.get_output_embeddings(),
        cosines=cosines[0].float().contiguous(),
        sines=sines[0].float().contiguous(),
    )


def _part(network: Any, block: Block, part: Part) -> Attention | FeedForward:
    modules, output = [writer.module for writer in part.input_projections], part.output.module
    norm = Norm.of(part.pre_norm)
    if part.kind == "ffn_channels":
        up, gate = modules
        return FeedForward(norm, gate, up, output, part.units)
    module: Any = part.owner
    head_norms = [
        None if (norm_module := getattr(module, name, None)) is None else Norm.of(norm_module)
        for name in ("q_norm", "k_norm")
    ]
    return Attention(
        index=part.block,
        norm=norm,
        writers=(modules[0], modules[1], modules[2]),
        output=output,
        heads=part.units * part.heads_per_unit,
        kv_heads=part.units,
        width=part.head_dim,
        scale=float(module.scaling),
        window=_window(network, module),
        query_norm=head_norms[0],
        key_norm=head_norms[1],
    )


def _window(network: Any, attention: Any) -> int | None:
    if network.config.model_type == "mistral":
        window = network.config.sliding_window
    else:
        window = getattr(attention, "sliding_window", None)
    return None if window is None else int(window)


def rows_of(layer: Any) -> int:
    return int(layer.out_features)


def stacked(layers: Sequence[nn.Module]) -> nn.Module | None:
    """Merge layers that share an input into one; they become views of it, so that no memory is added. None if they
    cannot be merged."""
    packed = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if len(packed) == len(layers):
        return _stacked_packed(packed)
    return None if packed else _stacked_plain(layers)


def _stacked_packed(layers: list[QuantizedLinear]) -> QuantizedLinear | None:
    first = layers[0]
    mergeable = all(layer.scheme == first.scheme and layer.bias is None for layer in layers)
    if (
        not mergeable
        or first.scheme.static
        or first.scheme.weight.group_size == PER_TENSOR
        or "tensor" in first.packed.tensors
    ):
        return None
    rows = [layer.out_features for layer in layers]
    merged = QuantizedLinear(first.in_features, sum(rows), first.scheme, bias=False, dtype=torch.float32)
    for name in first.packed.tensors:
        tensor = torch.cat([getattr(layer, name) for layer in layers])
        setattr(merged, name, tensor)
        for layer, view in zip(layers, tensor.split(rows), strict=True):
            setattr(layer, name, view)
    return merged


def _stacked_plain(layers: Sequence[Any]) -> nn.Linear | None:
    first = layers[0]
    if any(type(layer) is not nn.Linear or layer.weight.dtype != first.weight.dtype for layer in layers):
        return None
    if any((layer.bias is None) != (first.bias is None) for layer in layers):
        return None
    rows = [layer.out_features for layer in layers]
    merged = nn.Linear(first.in_features, sum(rows), bias=first.bias is not None, device="meta")
    for name in ("weight", "bias"):
        if getattr(first, name) is None:
            continue
        tensor = torch.cat([getattr(layer, name).detach() for layer in layers])
        setattr(merged, name, nn.Parameter(tensor, requires_grad=False))
        for layer, view in zip(layers, tensor.split(rows), strict=True):
            getattr(layer, name).data = view
    return merged
