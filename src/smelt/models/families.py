"""Where each model family keeps its parts: module paths from the backbone and attribute names, as plain data.

To add a family, add a row to FAMILIES; methods never name one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from smelt.errors import ModelError

Residual = Literal["pre", "post"]


@dataclass(frozen=True)
class AttentionPaths:
    """Paths from a block to its attention. `owner` is the module that runs it and that surgery may replace."""

    owner: str
    queries: str
    keys: str
    values: str
    output: str
    head_dim: str = "head_dim"
    # Attributes of the owner that its forward reads and that change with the heads: name -> "heads" or "width".
    attributes: Mapping[str, str] = field(default_factory=dict)
    # The argument with one plane per head (MPNet's shared position bias), sliced to the kept heads.
    head_planes: str | None = None
    joint_norms: bool = False  # Q/K norms span all heads: no head can be removed
    clip: str | None = None  # the config field with the clipping bound of queries, keys and values

    @property
    def fused(self) -> bool:
        """Whether one module computes queries, keys and values, in that order."""
        return self.queries == self.keys == self.values


@dataclass(frozen=True)
class FeedForwardPaths:
    """Paths from a block to its feed-forward: input projections (up, optionally gate) and output projection."""

    input_projections: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class ExpertPaths:
    """Paths from a block to its experts and router. `gate`, `up` and `down` are layer names inside an expert, as in the
    published checkpoints."""

    owner: str
    router: str
    gate: str
    up: str
    down: str
    top_k: str = "top_k"  # the router's attribute: the number of experts per token


@dataclass(frozen=True)
class ChannelPaths:
    """A convolution with its norm in a residual block, and the convolution that consumes its channels."""

    input_projection: str
    norm: str
    output: str


@dataclass(frozen=True)
class Family:
    """One family of architectures. `blocks` is the path of the block list from `network.base_model`."""

    name: str
    model_types: tuple[str, ...]
    blocks: str
    residual: Residual
    causal: bool = False  # a position attends to earlier ones only
    returns_tuple: bool = False  # a block returns (hidden states, ...) and not the hidden states themselves
    attention: AttentionPaths | None = None
    feed_forward: FeedForwardPaths | None = None
    experts: ExpertPaths | None = None  # of a mixture of experts; a block without experts has the feed-forward
    channels: tuple[tuple[ChannelPaths, ...], ...] = ()  # alternatives; the first whose paths all exist is used
    # Config fields of the sizes that surgery changes, where transformers has one.
    config_names: Mapping[str, str] = field(default_factory=dict)
    # Of pre-norm families: the norms before attention and feed-forward (from a block), the final norm, and the
    # embedding tables that start the residual stream (from the backbone).
    norms: tuple[str, str] | None = None
    final_norm: str | None = None
    embeddings: tuple[str, ...] = ()
    # The config flag that, when false, makes a pre-norm family post-norm (OPT-350m).
    pre_norm_flag: str | None = None


_LLAMA_ATTENTION = AttentionPaths(
    owner="self_attn",
    queries="self_attn.q_proj",
    keys="self_attn.k_proj",
    values="self_attn.v_proj",
    output="self_attn.o_proj",
)
_LLAMA_FEED_FORWARD = FeedForwardPaths(input_projections=("mlp.up_proj", "mlp.gate_proj"), output="mlp.down_proj")
_EXPERTS = ExpertPaths("mlp.experts", "mlp.gate", gate="gate_proj", up="up_proj", down="down_proj")
_BERT_ATTENTION = AttentionPaths(
    owner="attention.self",
    queries="attention.self.query",
    keys="attention.self.key",
    values="attention.self.value",
    output="attention.output.dense",
    head_dim="attention_head_size",
    attributes={"num_attention_heads": "heads", "all_head_size": "width"},
)
_GROUPED_NAMES = {
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_channels": "intermediate_size",
}
_PLAIN_NAMES = {"heads": "num_attention_heads", "ffn_channels": "intermediate_size"}

_LLAMA = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2", "qwen3", "smollm3"),
    blocks="layers",
    residual="pre",
    causal=True,
    attention=_LLAMA_ATTENTION,
    feed_forward=_LLAMA_FEED_FORWARD,
    config_names=_GROUPED_NAMES,
    norms=("input_layernorm", "post_attention_layernorm"),
    final_norm="norm",
    embeddings=("embed_tokens",),
)

FAMILIES: tuple[Family, ...] = (
    _LLAMA,
    replace(
        _LLAMA,
        name="mixtral",
        model_types=("mixtral",),
        feed_forward=None,
        experts=replace(_EXPERTS, gate="w1", up="w3", down="w2"),
        config_names={**_GROUPED_NAMES, "experts": "intermediate_size"},
    ),
    replace(
        _LLAMA,
        name="qwen3-moe",
        model_types=("qwen3_moe",),
        experts=_EXPERTS,
        config_names={**_GROUPED_NAMES, "experts": "moe_intermediate_size"},
    ),
    replace(
        _LLAMA,
        name="olmoe",
        model_types=("olmoe",),
        attention=replace(_LLAMA_ATTENTION, joint_norms=True, clip="clip_qkv"),
        feed_forward=None,
        experts=_EXPERTS,
        config_names={**_GROUPED_NAMES, "experts": "intermediate_size"},
    ),
    Family(
        name="bert",
        model_types=("bert", "roberta", "xlm-roberta", "camembert"),
        blocks="encoder.layer",
        residual="post",
        attention=_BERT_ATTENTION,
        feed_forward=FeedForwardPaths(input_projections=("intermediate.dense",), output="output.dense"),
        config_names=_PLAIN_NAMES,
    ),
    Family(
        name="distilbert",
        model_types=("distilbert",),
        blocks="transformer.layer",
        residual="post",
        attention=AttentionPaths(
            owner="attention",
            queries="attention.q_lin",
            keys="attention.k_lin",
            values="attention.v_lin",
            output="attention.out_lin",
            head_dim="attention_head_size",
            attributes={"n_heads": "heads"},
        ),
        feed_forward=FeedForwardPaths(input_projections=("ffn.lin1",), output="ffn.lin2"),
        config_names={"heads": "n_heads", "ffn_channels": "hidden_dim"},
    ),
    Family(
        name="mpnet",
        model_types=("mpnet",),
        blocks="encoder.layer",
        residual="post",
        returns_tuple=True,
        attention=AttentionPaths(
            owner="attention.attn",
            queries="attention.attn.q",
            keys="attention.attn.k",
            values="attention.attn.v",
            output="attention.attn.o",
            head_dim="attention_head_size",
            attributes={"num_attention_heads": "heads", "all_head_size": "width"},
            head_planes="position_bias",
        ),
        feed_forward=FeedForwardPaths(input_projections=("intermediate.dense",), output="output.dense"),
        config_names=_PLAIN_NAMES,
    ),
    Family(
        name="vit",
        model_types=("vit",),
        blocks="layers",
        residual="pre",
        attention=AttentionPaths(
            owner="attention",
            queries="attention.q_proj",
            keys="attention.k_proj",
            values="attention.v_proj",
            output="attention.o_proj",
            attributes={"num_attention_heads": "heads"},
        ),
        feed_forward=FeedForwardPaths(input_projections=("mlp.fc1",), output="mlp.fc2"),
        config_names=_PLAIN_NAMES,
        norms=("layernorm_before", "layernorm_after"),
        final_norm="layernorm",
    ),
    Family(
        name="gpt2",
        model_types=("gpt2",),
        blocks="h",
        residual="pre",
        causal=True,
        attention=AttentionPaths(
            owner="attn",
            queries="attn.c_attn",
            keys="attn.c_attn",
            values="attn.c_attn",
            output="attn.c_proj",
            attributes={"num_heads": "heads", "split_size": "width"},
        ),
        feed_forward=FeedForwardPaths(input_projections=("mlp.c_fc",), output="mlp.c_proj"),
        config_names={"heads": "n_head", "ffn_channels": "n_inner"},
        norms=("ln_1", "ln_2"),
        final_norm="ln_f",
        embeddings=("wte", "wpe"),
    ),
    Family(
        name="opt",
        model_types=("opt",),
        blocks="decoder.layers",
        residual="pre",
        causal=True,
        attention=AttentionPaths(
            owner="self_attn",
            queries="self_attn.q_proj",
            keys="self_attn.k_proj",
            values="self_attn.v_proj",
            output="self_attn.out_proj",
            attributes={"num_heads": "heads"},
        ),
        feed_forward=FeedForwardPaths(input_projections=("fc1",), output="fc2"),
        config_names={"heads": "num_attention_heads", "ffn_channels": "ffn_dim"},
        norms=("self_attn_layer_norm", "final_layer_norm"),
        final_norm="decoder.final_layer_norm",
        embeddings=("decoder.embed_tokens", "decoder.embed_positions"),
        pre_norm_flag="do_layer_norm_before",
    ),
    Family(
        name="resnet",
        model_types=("resnet", "cifar_resnet"),
        blocks="encoder.stages.*.layers",
        residual="post",
        channels=(
            (
                ChannelPaths("layer.0.convolution", "layer.0.normalization", "layer.1.convolution"),
                ChannelPaths("layer.1.convolution", "layer.1.normalization", "layer.2.convolution"),
            ),
            (ChannelPaths("layer.0.convolution", "layer.0.normalization", "layer.1.convolution"),),
        ),
    ),
)


def family_of(model_type: str) -> Family:
    """Return the family of a config's `model_type`."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(supported_type for family in FAMILIES for supported_type in family.model_types))
    raise ModelError(f"the architecture {model_type!r} is not supported; Smelt supports {known}.")
