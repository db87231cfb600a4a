"""Llama and its kin taken apart for the fast paths: what each layer is made of, in the order in which it runs.

A fast path computes the same function from the same tensors, quantised or not, pruned or not. What is not known to be
such a network runs as it is.
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

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # RMS norms before, rotary halves, silu gates, nothing else
ROTATIONS = ("default", "linear", "llama3", "yarn")  # that do not change with the length


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        return cls(module.weight.detach(), float(module.variance_epsilon))


@dataclass(frozen=True)
class Attention:
    index: int  # of the layer, as the cache counts them
    norm: Norm
    writers: tuple[nn.Module, nn.Module, nn.Module]  # queries, keys, values
    output: nn.Module
    heads: int
    kv_heads: int
    width: int  # of a head
    scale: float
    window: int | None
    query_norm: Norm | None = None  # of each head
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
    """`parts` are attention and feed-forward in turns; `cosines` and `sines` are those of every position."""

    table: Tensor  # [vocabulary, hidden size]
    parts: tuple[Attention | FeedForward, ...]
    norm: Norm
    head: nn.Module
    cosines: Tensor  # [positions, head size], float32
    sines: Tensor

    @property
    def width(self) -> int:
        return int(self.table.shape[1])


def reason_against(model: Model) -> str | None:
    """Why a network cannot be taken apart; None where it can."""
    config = model.network.config
    if config.model_type not in FAMILIES or config.hidden_act not in ("silu", "swish"):
        return f"{config.model_type} is not among {', '.join(FAMILIES)}"
    if model.network.model.rotary_emb.rope_type not in ROTATIONS:
        return "its rotary positions change with the length"
    if any(not part.units for part in model.anatomy.parts):
        return "a layer lost all of its heads or filters"
    return None


def decoder_of(model: Model, context: int) -> Decoder:
    """A network that `reason_against` has nothing against, for so many positions."""
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
    holder: Any = part.owner
    head_norms = [
        None if (found := getattr(holder, name, None)) is None else Norm.of(found) for name in ("q_norm", "k_norm")
    ]
    return Attention(
        index=part.block,
        norm=norm,
        writers=(modules[0], modules[1], modules[2]),
        output=output,
        heads=part.units * part.heads_per_unit,
        kv_heads=part.units,
        width=part.head_dim,
        scale=float(holder.scaling),
        window=_window(network, holder),
        query_norm=head_norms[0],
        key_norm=head_norms[1],
    )


def _window(network: Any, attention: Any) -> int | None:
    if network.config.model_type == "mistral":
        found = network.config.sliding_window
    else:
        found = getattr(attention, "sliding_window", None)
    return None if found is None else int(found)


def rows_of(layer: Any) -> int:
    return int(layer.out_features)


def stacked(layers: Sequence[nn.Module]) -> nn.Module | None:
    """One layer whose rows are those of several with one input; these become views of it, so that no memory is added.
    None where they do not fit together."""
    packed = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if len(packed) == len(layers):
        return _stacked_packed(packed)
    return None if packed else _stacked_plain(layers)


def _stacked_packed(layers: list[QuantizedLinear]) -> QuantizedLinear | None:
    first = layers[0]
    same = all(layer.scheme == first.scheme and layer.bias is None for layer in layers)
    if (
        not same
        or first.scheme.static
        or first.scheme.weight.group_size == PER_TENSOR
        or "tensor" in first.packed.tensors
    ):
        return None
    rows = [layer.out_features for layer in layers]
    whole = QuantizedLinear(first.in_features, sum(rows), first.scheme, bias=False, dtype=torch.float32)
    for name in first.packed.tensors:
        together = torch.cat([getattr(layer, name) for layer in layers])
        setattr(whole, name, together)
        for layer, part in zip(layers, together.split(rows), strict=True):
            setattr(layer, name, part)
    return whole


def _stacked_plain(layers: Sequence[Any]) -> nn.Linear | None:
    first = layers[0]
    if any(type(layer) is not nn.Linear or layer.weight.dtype != first.weight.dtype for layer in layers):
        return None
    if any((layer.bias is None) != (first.bias is None) for layer in layers):
        return None
    rows = [layer.out_features for layer in layers]
    whole = nn.Linear(first.in_features, sum(rows), bias=first.bias is not None, device="meta")
    for name in ("weight", "bias"):
        if getattr(first, name) is None:
            continue
        together = torch.cat([getattr(layer, name).detach() for layer in layers])
        setattr(whole, name, nn.Parameter(together, requires_grad=False))
        for layer, part in zip(layers, together.split(rows), strict=True):
            getattr(layer, name).data = part
    return whole
