"""The structure of Llama-like decoders for the compiled paths: the parts of each layer in execution order.

A compiled path computes the same function from the same tensors, quantized or not, pruned or not. Any other network
runs eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.models.anatomy import Block, Part
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.format import PER_TENSOR

# pre-RMSNorm, half-split RoPE, SiLU gates, or experts with SiLU gates; nothing else
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "olmoe")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those that do not depend on the sequence length


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    epsilon: float

    @classmethod
    def from_module(cls, module: Any) -> Norm:
        return cls(module.weight.detach(), float(module.variance_epsilon))


@dataclass(frozen=True)
class Attention:
    layer: int  # in the KV cache
    norm: Norm
    qkv_projections: tuple[nn.Module, nn.Module, nn.Module]
    output: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    query_norm: Norm | None = None  # per head, or of all heads together if `joint_norms`
    key_norm: Norm | None = None
    joint_norms: bool = False
    clip: float | None = None  # bound of Q, K and V, after their norms

    @property
    def input_projections(self) -> tuple[nn.Module, ...]:
        return self.qkv_projections


@dataclass(frozen=True)
class FeedForward:
    norm: Norm
    gate: nn.Module
    up: nn.Module
    output: nn.Module
    intermediate_size: int

    @property
    def input_projections(self) -> tuple[nn.Module, ...]:
        return self.gate, self.up


@dataclass(frozen=True)
class ExpertLayers:
    gate: nn.Module
    up: nn.Module
    output: nn.Module


@dataclass(frozen=True)
class MixtureOfExperts:
    """Each token is processed by its `top_k` experts, whose results are added up with the router's weights."""

    norm: Norm
    router: Tensor  # [experts, hidden size]
    top_k: int
    normalize: bool  # the weights of a token add up to 1
    weight_dtype: torch.dtype
    experts: tuple[ExpertLayers, ...]


@dataclass(frozen=True)
class Decoder:
    """`parts` in execution order; `cosines` and `sines` are the RoPE tables of all positions."""

    embedding: Tensor  # [vocabulary, hidden size]
    parts: tuple[Attention | FeedForward | MixtureOfExperts, ...]
    final_norm: Norm
    lm_head: nn.Module
    cosines: Tensor  # [positions, head_dim], float32
    sines: Tensor

    @property
    def hidden_size(self) -> int:
        return int(self.embedding.shape[1])


def unsupported_reason(model: Model) -> str | None:
    """Return why a network does not have this structure, or None if it has."""
    config = model.network.config
    if config.model_type not in FAMILIES or config.hidden_act not in ("silu", "swish"):
        return f"{config.model_type} is not among {', '.join(FAMILIES)}"
    if model.network.model.rotary_emb.rope_type not in ROPE_TYPES:
        return "its RoPE depends on the sequence length"
    if any(not part.units for part in model.anatomy.parts):
        return "a layer lost all of its heads or channels"
    return None


def build_decoder(model: Model, max_model_len: int) -> Decoder:
    """Return the structure of a supported network, with RoPE tables for `max_model_len` positions."""
    network: Any = model.network
    anatomy = model.anatomy
    assert anatomy.final_norm is not None
    positions = torch.arange(max_model_len, device=model.device)[None]
    cosines, sines = network.model.rotary_emb(torch.zeros(1, device=model.device), positions)
    return Decoder(
        embedding=network.get_input_embeddings().weight.detach(),
        parts=_build_parts(model),
        final_norm=Norm.from_module(anatomy.final_norm),
        lm_head=network.get_output_embeddings(),
        cosines=cosines[0].float().contiguous(),
        sines=sines[0].float().contiguous(),
    )


def linear_groups(model: Model) -> list[tuple[nn.Module, ...]]:
    """Return the linear layers of a supported network but its LM head and experts; those that share an input are
    together."""
    parts = [part for part in _build_parts(model) if not isinstance(part, MixtureOfExperts)]
    return [group for part in parts for group in (part.input_projections, (part.output,))]


def mixtures(model: Model) -> list[MixtureOfExperts]:
    """Return the mixtures of experts of a network, in execution order."""
    mixtures = [_build_mixture(model.network, block) for block in model.anatomy.blocks]
    return [mixture for mixture in mixtures if mixture is not None]


def _build_parts(model: Model) -> tuple[Attention | FeedForward | MixtureOfExperts, ...]:
    return tuple(part for block in model.anatomy.blocks for part in _build_block(model.network, block))


def _build_block(network: Any, block: Block) -> Iterator[Attention | FeedForward | MixtureOfExperts]:
    yield from (_build_part(network, part) for part in block.parts if part.mixture is None)
    mixture = _build_mixture(network, block)
    if mixture is not None:
        yield mixture


def _build_mixture(network: Any, block: Block) -> MixtureOfExperts | None:
    parts = [part for part in block.parts if part.mixture is not None]
    if not parts or parts[0].mixture is None:
        return None
    router = parts[0].mixture.router
    experts = []
    for part in parts:
        up, gate = (projection.module for projection in part.input_projections)
        experts.append(ExpertLayers(gate, up, part.output.module))
    is_mixtral = network.config.model_type == "mixtral"
    return MixtureOfExperts(
        norm=Norm.from_module(parts[0].pre_norm),
        router=router.weight.detach(),
        top_k=parts[0].mixture.top_k,
        normalize=is_mixtral or bool(router.norm_topk_prob),
        weight_dtype=torch.float32 if is_mixtral else router.weight.dtype,
        experts=tuple(experts),
    )


def _build_part(network: Any, part: Part) -> Attention | FeedForward:
    modules = [projection.module for projection in part.input_projections]
    output = part.output.module
    norm = Norm.from_module(part.pre_norm)
    if part.kind == "ffn_channels":
        up, gate = modules
        return FeedForward(norm, gate, up, output, part.units)
    module: Any = part.owner
    head_norms = [
        None if (norm_module := getattr(module, name, None)) is None else Norm.from_module(norm_module)
        for name in ("q_norm", "k_norm")
    ]
    return Attention(
        layer=part.block,
        norm=norm,
        qkv_projections=(modules[0], modules[1], modules[2]),
        output=output,
        num_heads=part.units * part.heads_per_unit,
        num_kv_heads=part.units,
        head_dim=part.head_dim,
        scale=float(module.scaling),
        window=_sliding_window(network, module),
        query_norm=head_norms[0],
        key_norm=head_norms[1],
        joint_norms=part.fixed is not None and head_norms[0] is not None,
        clip=_clip(network, part),
    )


def _clip(network: Any, part: Part) -> float | None:
    if not part.clipped or part.attention is None or part.attention.clip is None:
        return None
    return float(getattr(network.config, part.attention.clip))


def _sliding_window(network: Any, attention: Any) -> int | None:
    if network.config.model_type in ("mistral", "mixtral"):
        window = network.config.sliding_window
    else:
        window = getattr(attention, "sliding_window", None)
    return None if window is None else int(window)


def merge_linears(layers: Sequence[nn.Module]) -> nn.Module | None:
    """Merge layers that share an input into one; they become views of it, so that no memory is added. None if they
    cannot be merged."""
    packed = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if len(packed) == len(layers):
        return _merge_quantized(packed)
    return None if packed else _merge_plain(layers)


def _merge_quantized(layers: list[QuantizedLinear]) -> QuantizedLinear | None:
    first = layers[0]
    mergeable = all(layer.scheme == first.scheme and layer.bias is None and not layer.moved for layer in layers)
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


def _merge_plain(layers: Sequence[Any]) -> nn.Linear | None:
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
