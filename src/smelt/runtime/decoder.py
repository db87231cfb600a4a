"""The structure of Llama-like decoders for the compiled paths: the parts of each layer in execution order.

A compiled path computes the same function from the same tensors, quantized or not, pruned or not. Any other network
runs eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.kernels.gated_activation import SILU, GatedActivation
from smelt.models.anatomy import Block, Part
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.format import PER_TENSOR

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")  # not: those that change while a sequence grows
_ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GatedActivation("gelu_tanh")}


@dataclass(frozen=True)
class _Layout:
    """How decoders of a model type differ from Llama's. Paths of norms start at a block: attention, feed-forward."""

    pre_norms: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, str] | None = None  # of what is added to the residual stream
    offset_norms: bool = False  # norm weights are stored minus one
    interleaved_rope: bool = False  # RoPE rotates neighbors, not halves
    config_window: bool = False  # all layers have the sliding window of the config
    float32_routing: bool = False  # the weights of experts are not rounded to the model's dtype
    clamped_experts: bool = False  # experts have the clamped activation of GPT-OSS


_LLAMA = _Layout()
_LAYOUTS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_moe", "olmoe", "granite", "seed_oss", "ministral"), _LLAMA),
    **dict.fromkeys(("mistral", "phi3"), _Layout(config_window=True)),
    "mixtral": _Layout(config_window=True, float32_routing=True),
    "gemma": _Layout(offset_norms=True),
    "gemma3_text": _Layout(
        pre_norms=("input_layernorm", "pre_feedforward_layernorm"),
        post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        offset_norms=True,
    ),
    **dict.fromkeys(
        ("olmo2", "olmo3"),
        _Layout(pre_norms=None, post_norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    ),
    **dict.fromkeys(("glm", "ernie4_5", "helium"), _Layout(interleaved_rope=True)),
    "glm4": _Layout(post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"), interleaved_rope=True),
    "gpt_oss": _Layout(clamped_experts=True),
}
FAMILIES = tuple(_LAYOUTS)


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    epsilon: float

    @classmethod
    def from_module(cls, module: Any, *, offset: bool = False) -> Norm:
        """Read an RMSNorm; `offset`: its weight is stored minus one."""
        weight = module.weight.detach()
        epsilon = getattr(module, "variance_epsilon", None)
        return cls(weight.float() + 1.0 if offset else weight, float(module.eps if epsilon is None else epsilon))


@dataclass(frozen=True)
class Rotary:
    """RoPE of the first `rotary_dim` values of a head: value i and i + rotary_dim / 2 are a pair, or neighbors if
    `interleaved`. The tables have cos 1 and sin 0 for the values behind."""

    cosines: Tensor  # [positions, head_dim], float32
    sines: Tensor
    rotary_dim: int
    interleaved: bool = False


@dataclass(frozen=True)
class Attention:
    layer: int  # in the KV cache
    norm: Norm | None
    input_projections: tuple[nn.Module, ...]  # of Q, K and V, or one layer with all of them
    output: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    rotary: Rotary
    query_norm: Norm | None = None  # per head, or of all heads together if `joint_norms`
    key_norm: Norm | None = None
    joint_norms: bool = False
    clip: float | None = None  # bound of Q, K and V, after their norms
    sinks: Tensor | None = None  # [num_heads], float32: a score of each head that has no value
    post_norm: Norm | None = None
    residual_scale: float = 1.0
    map_of: int | None = None  # the layer whose queries and keys it uses; then V is its only input projection

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """The widths of Q, K and V, or of V alone."""
        kv_width = self.num_kv_heads * self.head_dim
        return (self.num_heads * self.head_dim, kv_width, kv_width) if self.map_of is None else (kv_width,)


@dataclass(frozen=True)
class FeedForward:
    norm: Norm | None
    input_projections: tuple[nn.Module, ...]  # gate and up, or one layer with both
    output: nn.Module
    intermediate_size: int
    activation: GatedActivation = SILU
    post_norm: Norm | None = None
    residual_scale: float = 1.0

    @property
    def input_sizes(self) -> tuple[int, int]:
        """The widths of gate and up."""
        return self.intermediate_size, self.intermediate_size


@dataclass(frozen=True)
class ExpertLayers:
    gate: nn.Module
    up: nn.Module
    output: nn.Module


@dataclass(frozen=True)
class CarvedExperts:
    """Channels that every token uses, and those of each expert. A router ahead of all layers has chosen the expert of a
    token. Networks that scale what they add to the residual stream are not carved."""

    shared: FeedForward
    experts: tuple[ExpertLayers, ...]


@dataclass(frozen=True)
class MixtureOfExperts:
    """Each token is processed by its `top_k` experts, whose results are added up with the router's weights."""

    norm: Norm
    router: Tensor  # [experts, hidden size]
    router_bias: Tensor | None
    top_k: int
    normalize: bool  # the weights of a token add up to 1
    weight_dtype: torch.dtype
    experts: tuple[ExpertLayers, ...]
    activation: GatedActivation = SILU


DecoderPart = Attention | FeedForward | CarvedExperts | MixtureOfExperts


@dataclass(frozen=True)
class Decoder:
    """`parts` in execution order."""

    embedding: Tensor  # [vocabulary, hidden size]
    embedding_scale: float
    parts: tuple[DecoderPart, ...]
    final_norm: Norm
    lm_head: nn.Module

    @property
    def hidden_size(self) -> int:
        return int(self.embedding.shape[1])


def unsupported_reason(model: Model, *, carved_experts: bool = False) -> str | None:
    """Return why a network does not have this structure, or None if it has; `carved_experts` are a part of it."""
    config: Any = model.network.config
    if config.model_type not in _LAYOUTS:
        return f"{config.model_type} is not among {', '.join(FAMILIES)}"
    if _activation_name(config) not in _ACTIVATIONS:
        return f"its activation is {_activation_name(config)}"
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            return f"its config sets {name}"
    rope_types = model.network.model.rotary_emb.rope_type
    if not set(rope_types.values() if isinstance(rope_types, dict) else [rope_types]) <= set(ROPE_TYPES):
        return "its RoPE depends on the sequence length"
    if any(part.carved for part in model.anatomy.parts) and not carved_experts:
        return "a router ahead of its layers chooses the experts"
    if any(not part.units for part in model.anatomy.parts):
        return "a layer lost all of its heads or channels"
    return None


def reuses_maps(model: Model) -> bool:
    """Return whether a layer uses the attention map of another one."""
    return any(part.map_of is not None for part in model.anatomy.parts)


def has_sinks(model: Model) -> bool:
    """Return whether attention has a sink for each head."""
    return any(getattr(part.owner, "sinks", None) is not None for part in model.anatomy.parts)


def build_decoder(model: Model, max_model_len: int) -> Decoder:
    """Return the structure of a supported network, with RoPE tables for `max_model_len` positions."""
    network: Any = model.network
    config, embedding = network.config, network.get_input_embeddings()
    scale = float(getattr(embedding, "embed_scale", 1.0)) * float(getattr(config, "embedding_multiplier", 1.0))
    final_norm = Norm.from_module(network.model.norm, offset=_LAYOUTS[config.model_type].offset_norms)
    if (logits_scaling := float(getattr(config, "logits_scaling", 1.0))) != 1.0:  # the LM head is linear
        final_norm = replace(final_norm, weight=final_norm.weight.float() / logits_scaling)
    return Decoder(
        embedding=embedding.weight.detach(),
        embedding_scale=scale,
        parts=_build_parts(model, max_model_len),
        final_norm=final_norm,
        lm_head=network.get_output_embeddings(),
    )


def linear_groups(model: Model) -> list[tuple[nn.Module, ...]]:
    """Return the linear layers of a supported network but its LM head and experts; those that share an input are
    together."""
    parts = [part for part in _build_parts(model, 1) if isinstance(part, Attention | FeedForward)]
    return [group for part in parts for group in (part.input_projections, (part.output,))]


def mixtures(model: Model) -> list[MixtureOfExperts]:
    """Return the mixtures of experts of a network, in execution order."""
    mixtures = [_build_mixture(model.network, block) for block in model.anatomy.blocks]
    return [mixture for mixture in mixtures if mixture is not None]


def carved_layers(model: Model) -> list[CarvedExperts]:
    """Return the feed-forwards of a network that are carved into experts, in execution order."""
    layers = [_build_carved(model.network, block) for block in model.anatomy.blocks]
    return [layer for layer in layers if layer is not None]


def _build_parts(model: Model, max_model_len: int) -> tuple[DecoderPart, ...]:
    rotaries: dict[str | None, Rotary] = {}
    attention: dict[int, Attention] = {}
    return tuple(
        part
        for block in model.anatomy.blocks
        for part in _build_block(model, block, rotaries, attention, max_model_len)
    )


def _build_block(
    model: Model, block: Block, rotaries: dict[str | None, Rotary], attention: dict[int, Attention], max_model_len: int
) -> Iterator[DecoderPart]:
    """Yield the parts of a block; `rotaries` has the RoPE tables by type of layer, and `attention` the attention of
    earlier blocks, as far as they are known."""
    carved = _build_carved(model.network, block)
    for part in (part for part in block.parts if part.mixture is None and not part.carved):
        if part.kind == "ffn_channels":
            yield carved or _build_feed_forward(model.network, block, part)
            continue
        if part.map_of is not None:
            yield _build_reused_attention(model.network, block, part, attention[part.map_of])
            continue
        layer_type = _rope_layer_type(model.network, block)
        if layer_type not in rotaries:
            rotaries[layer_type] = _build_rotary(model, part.head_dim, layer_type, max_model_len)
        attention[block.index] = _build_attention(model.network, block, part, rotaries[layer_type])
        yield attention[block.index]
    mixture = _build_mixture(model.network, block)
    if mixture is not None:
        yield mixture


def _rope_layer_type(network: Any, block: Block) -> str | None:
    """Return the type of a layer where RoPE differs by type, else None."""
    by_type = isinstance(network.model.rotary_emb.rope_type, dict)
    return str(network.config.layer_types[block.index]) if by_type else None


def _build_rotary(model: Model, head_dim: int, layer_type: str | None, max_model_len: int) -> Rotary:
    network: Any = model.network
    positions = torch.arange(max_model_len, device=model.device)[None]
    like = torch.zeros(1, device=model.device)
    tables = network.model.rotary_emb(like, positions, *(() if layer_type is None else (layer_type,)))
    frequencies = network.model.rotary_emb.get_buffer("inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
    interleaved, rotary_dim = _LAYOUTS[network.config.model_type].interleaved_rope, 2 * len(frequencies)
    halves = [table[0, :, : len(frequencies)].float() for table in tables]  # the second half repeats the first
    whole = [half.repeat_interleave(2, dim=1) if interleaved else torch.cat((half, half), dim=1) for half in halves]
    cosines, sines = (
        F.pad(table, (0, head_dim - rotary_dim), value=value) for table, value in zip(whole, (1.0, 0.0), strict=True)
    )
    return Rotary(cosines, sines, rotary_dim, interleaved)


def _build_norms(network: Any, block: Block, index: int) -> dict[str, Any]:
    """Return the norms before and after the attention (0) or the feed-forward (1) of a block."""
    layout = _LAYOUTS[network.config.model_type]
    return {
        name: None
        if paths is None
        else Norm.from_module(block.module.get_submodule(paths[index]), offset=layout.offset_norms)
        for name, paths in (("norm", layout.pre_norms), ("post_norm", layout.post_norms))
    }


def _build_mixture(network: Any, block: Block) -> MixtureOfExperts | None:
    parts = [part for part in block.parts if part.mixture is not None]
    if not parts or parts[0].mixture is None:
        return None
    router, layout = parts[0].mixture.router, _LAYOUTS[network.config.model_type]
    experts = []
    for part in parts:
        up, gate = (projection.module for projection in part.input_projections)
        experts.append(ExpertLayers(gate, up, part.output.module))
    bias = getattr(router, "bias", None)
    norm = _build_norms(network, block, 1)["norm"]
    assert norm is not None
    config, activation = network.config, _activation(network.config)
    if layout.clamped_experts:
        # Both are constants of the module in older versions of transformers.
        alpha, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
        activation = GatedActivation("swiglu_oai", float(alpha), float(limit))
    return MixtureOfExperts(
        norm=norm,
        router=router.weight.detach(),
        router_bias=None if bias is None else bias.detach(),
        top_k=parts[0].mixture.top_k,
        normalize=bool(getattr(router, "norm_topk_prob", True)),
        weight_dtype=torch.float32 if layout.float32_routing else router.weight.dtype,
        experts=tuple(experts),
        activation=activation,
    )


def _build_carved(network: Any, block: Block) -> CarvedExperts | None:
    own = [part for part in block.parts if part.carved]
    if not own:
        return None
    shared = next(part for part in block.parts if part.kind == "ffn_channels" and not part.carved)
    experts = []
    for part in own:
        up, gate = (projection.module for projection in part.input_projections)
        experts.append(ExpertLayers(gate, up, part.output.module))
    return CarvedExperts(_build_feed_forward(network, block, shared), tuple(experts))


def _activation_name(config: Any) -> str:
    name = getattr(config, "hidden_activation", None)
    return str(config.hidden_act if name is None else name)


def _activation(config: Any) -> GatedActivation:
    return _ACTIVATIONS[_activation_name(config)]


def _residual_scale(network: Any) -> float:
    return float(getattr(network.config, "residual_multiplier", 1.0))


def _distinct_layers(part: Part) -> tuple[nn.Module, ...]:
    """Return the input projections of a part; a fused layer once."""
    return tuple({id(projection.module): projection.module for projection in part.input_projections}.values())


def _build_feed_forward(network: Any, block: Block, part: Part) -> FeedForward:
    layers = _distinct_layers(part)
    return FeedForward(
        input_projections=layers[::-1],  # of separate layers, up is the first
        output=part.output.module,
        intermediate_size=part.units,
        activation=_activation(network.config),
        residual_scale=_residual_scale(network),
        **_build_norms(network, block, 1),
    )


def _build_attention(network: Any, block: Block, part: Part, rotary: Rotary) -> Attention:
    module: Any = part.owner
    layout = _LAYOUTS[network.config.model_type]
    head_norms = [
        None if (norm := getattr(module, name, None)) is None else Norm.from_module(norm, offset=layout.offset_norms)
        for name in ("q_norm", "k_norm")
    ]
    sinks = getattr(module, "sinks", None)
    window = network.config.sliding_window if layout.config_window else getattr(module, "sliding_window", None)
    return Attention(
        layer=part.block,
        input_projections=_distinct_layers(part),
        output=part.output.module,
        num_heads=part.units * part.heads_per_unit,
        num_kv_heads=part.units,
        head_dim=part.head_dim,
        scale=float(module.scaling),
        window=None if window is None else int(window),
        rotary=rotary,
        query_norm=head_norms[0],
        key_norm=head_norms[1],
        joint_norms=head_norms[0] is not None and len(head_norms[0].weight) != part.head_dim,
        clip=_clip(network, part),
        sinks=None if sinks is None else sinks.detach().float(),
        residual_scale=_residual_scale(network),
        **_build_norms(network, block, 0),
    )


def _build_reused_attention(network: Any, block: Block, part: Part, leader: Attention) -> Attention:
    """Return attention with the queries, keys and scale of an earlier layer."""
    return replace(
        leader,
        layer=part.block,
        input_projections=_distinct_layers(part),
        output=part.output.module,
        map_of=leader.layer,
        **_build_norms(network, block, 0),
    )


def _clip(network: Any, part: Part) -> float | None:
    if not part.clipped or part.attention is None or part.attention.clip is None:
        return None
    return float(getattr(network.config, part.attention.clip))


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
