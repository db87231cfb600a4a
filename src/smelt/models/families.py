"""Where each model family keeps its parts: module paths from the backbone and attribute names, as plain data.

To add a family, add a row to FAMILIES (docs/adding-a-family.md); methods never name one. A network of a type without a
row is still loaded and quantized: its blocks are found by their structure, but it has no parts that could be pruned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

# Where a block normalizes: what its parts read ("pre"), or the sum of residual and part ("post"). "other": neither, as
# in parallel blocks, with norms between a part and the sum, or with multipliers.
Residual = Literal["pre", "post", "other"]
GUIDE = "docs/adding-a-family.md"


@dataclass(frozen=True)
class AttentionPaths:
    """Paths from a block to its attention. `owner` is the module that runs it and that surgery may replace."""

    owner: str
    queries: str
    keys: str
    values: str
    output: str
    head_dim: str = "head_dim"
    # Attributes of the owner that its forward reads and that change with the heads: name -> "heads", "kv_heads" or
    # "width".
    attributes: Mapping[str, str] = field(default_factory=dict)
    # The argument with one plane per head (MPNet's shared position bias), sliced to the kept heads.
    head_planes: str | None = None
    fixed: str | None = None  # why no head can be removed
    removable: bool = True  # all heads can be removed; false: the owner does more than attend, so one must stay
    fixed_if: str | None = None  # `fixed` holds only if this config field is true
    clip: str | None = None  # the config field with the clipping bound of Q, K and V
    interface: bool = True  # transformers lets us replace its attention function; false: the module has its own
    # One layer computes the queries, key and value of a KV head as adjacent rows, KV head after KV head.
    interleaved: bool = False
    # Parameters of the owner, other than those of its projections, with one slice per head along their first dimension.
    head_parameters: tuple[str, ...] = ()
    relative: bool = False  # queries are also multiplied by a key per relative position

    @property
    def fused(self) -> bool:
        """Whether one module computes Q, K and V."""
        return self.queries == self.keys == self.values


@dataclass(frozen=True)
class FeedForwardPaths:
    """Paths from a block to its feed-forward: input projections (up, optionally gate) and output projection.

    The same path twice is one layer whose outputs are those of the gate, then those of the up projection.
    """

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
    top_k: str = "top_k"  # an attribute of the router or a config field: the number of experts per token
    scales: bool = True  # the up projection enters the product linearly: a scale can be moved into the output
    published: bool = True  # transformers reads experts under these names; false: published checkpoints fuse them


@dataclass(frozen=True)
class ChannelPaths:
    """A convolution with its norm in a residual block, and the convolution that consumes its channels."""

    input_projection: str
    norm: str
    output: str


@dataclass(frozen=True)
class Family:
    """One family of architectures.

    `blocks` are the paths of the block lists from `network.base_model` (of a vision-language model: from its language
    model); those that a network lacks are skipped. A part that a block lacks is skipped too.
    """

    name: str
    model_types: tuple[str, ...]
    blocks: str | tuple[str, ...]
    residual: Residual
    causal: bool = False  # a position attends to earlier ones only
    returns_tuple: bool = False  # a block returns (hidden states, ...) and not the hidden states themselves
    # Whether each block gets the output of the block before it; None: found out when the network is calibrated.
    chain: bool | None = True
    attention: AttentionPaths | None = None
    feed_forward: FeedForwardPaths | tuple[FeedForwardPaths, ...] | None = None  # alternatives as for `channels`
    experts: ExpertPaths | None = None  # of a mixture of experts; a block without experts has the feed-forward
    channels: tuple[tuple[ChannelPaths, ...], ...] = ()  # alternatives; the first whose paths all exist is used
    # Config fields of the sizes that surgery changes, where transformers has one.
    config_names: Mapping[str, str] = field(default_factory=dict)
    # Of pre-norm families: the norms before attention and feed-forward (from a block), the final norm, and the
    # embedding tables that start the residual stream (from the backbone).
    norms: tuple[str | None, str | None] | None = None  # None: a scale cannot be folded into it
    final_norm: str | None = None
    embeddings: tuple[str, ...] = ()
    post_norms: tuple[str, str] | None = None  # of post-norm encoders: after attention and feed-forward, from a block
    # The config flag that, when false, makes a pre-norm family post-norm (OPT-350m).
    pre_norm_flag: str | None = None
    stateful: bool = False  # layers carry a state from token to token, beside or instead of a KV cache
    unquantized: tuple[str, ...] = ()  # linear layers of a block that are too sensitive or too small
    quirks: tuple[str, ...] = ()  # how the family differs from its relatives, for the documentation

    @property
    def block_lists(self) -> tuple[str, ...]:
        return (self.blocks,) if isinstance(self.blocks, str) else self.blocks

    @property
    def prunable(self) -> bool:
        """Whether networks of this family have parts."""
        return bool(self.attention or self.feed_forward or self.experts or self.channels)


_JOINT_NORMS = "share one norm"

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

_FUSED_GATE_UP = FeedForwardPaths(input_projections=("mlp.gate_up_proj",) * 2, output="mlp.down_proj")
_FUSED_QKV = "are read from one fused layer at fixed offsets"
_ALIBI = "have a slope of the ALiBi position bias each"
_POST_NORMS = "norms between each part and the residual sum"
_PARALLEL = "attention and feed-forward run in parallel on one norm"
_OFFSET_NORMS = "norm weights are stored minus one"
_SHARED_EXPERTS = "shared experts beside the routed ones (quantized, not pruned)"
_WINDOWS = "layers with a sliding window"
_BART_ATTENTION = AttentionPaths(
    owner="self_attn",
    queries="self_attn.q_proj",
    keys="self_attn.k_proj",
    values="self_attn.v_proj",
    output="self_attn.out_proj",
    attributes={"num_heads": "heads"},
)

_LLAMA = Family(
    name="llama",
    model_types=(
        *("llama", "mistral", "qwen2", "qwen3", "smollm3", "seed_oss", "ernie4_5", "ministral", "ministral3"),
        *("hunyuan_v1_dense", "cwm", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),
    ),
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
        name="all-attention",
        model_types=("all_attention",),
        attention=replace(
            _LLAMA_ATTENTION,
            interface=False,
            head_parameters=(
                *("position_weight", "content_bias", "position_bias"),
                *("persistent_keys", "persistent_values"),
            ),
            relative=True,
        ),
        feed_forward=None,
        config_names={"heads": "num_attention_heads"},
        norms=("input_layernorm", None),
        quirks=("persistent keys and values in every head instead of a feed-forward", "relative positions"),
    ),
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
        attention=replace(_LLAMA_ATTENTION, fixed=_JOINT_NORMS, clip="clip_qkv"),
        feed_forward=None,
        experts=_EXPERTS,
        config_names={**_GROUPED_NAMES, "experts": "intermediate_size"},
    ),
    replace(
        _LLAMA,
        name="helium",
        model_types=("helium",),
        config_names={"ffn_channels": "intermediate_size"},
        quirks=("the attention output is as wide as the hidden size, so the config cannot describe removed heads",),
    ),
    replace(
        _LLAMA,
        name="gemma",
        model_types=("gemma",),
        norms=None,
        final_norm=None,
        quirks=(_OFFSET_NORMS, "embeddings scaled by the square root of the hidden size"),
    ),
    replace(
        _LLAMA,
        name="gemma2",
        model_types=("gemma2",),
        residual="other",
        norms=None,
        final_norm=None,
        quirks=(_OFFSET_NORMS, _POST_NORMS, _WINDOWS, "soft-capped logits"),
    ),
    replace(
        _LLAMA,
        name="gemma3",
        model_types=("gemma3_text",),
        residual="other",
        norms=None,
        final_norm=None,
        quirks=(_OFFSET_NORMS, _POST_NORMS, _WINDOWS, "Q/K norms per head", "RoPE differs by type of layer"),
    ),
    replace(
        _LLAMA,
        name="phi",
        model_types=("phi",),
        residual="other",
        attention=replace(_LLAMA_ATTENTION, output="self_attn.dense"),
        feed_forward=FeedForwardPaths(input_projections=("mlp.fc1",), output="mlp.fc2"),
        norms=None,
        final_norm=None,
        quirks=(_PARALLEL, "partial rotary embedding"),
    ),
    replace(
        _LLAMA,
        name="phi3",
        model_types=("phi3",),
        attention=AttentionPaths(
            "self_attn", *("self_attn.qkv_proj",) * 3, output="self_attn.o_proj", fixed=_FUSED_QKV
        ),
        feed_forward=_FUSED_GATE_UP,
        quirks=("fused QKV and gate-up projections",),
    ),
    replace(
        _LLAMA,
        name="phimoe",
        model_types=("phimoe",),
        feed_forward=None,
        experts=ExpertPaths("mlp.experts", "mlp.router", gate="w1", up="w3", down="w2", top_k="num_experts_per_tok"),
        config_names={**_GROUPED_NAMES, "experts": "intermediate_size"},
        quirks=("sparse-mixer routing", "layer norms with bias"),
    ),
    replace(
        _LLAMA,
        name="gpt-oss",
        model_types=("gpt_oss",),
        attention=replace(_LLAMA_ATTENTION, fixed="have an attention sink each"),
        feed_forward=None,
        experts=replace(_EXPERTS, router="mlp.router", scales=False, published=False),
        config_names={**_GROUPED_NAMES, "experts": "intermediate_size"},
        quirks=("attention sinks", _WINDOWS, "clamped activation and biases in the experts"),
    ),
    replace(
        _LLAMA,
        name="deepseek",
        model_types=("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        residual="other",
        attention=None,
        experts=_EXPERTS,
        config_names={"ffn_channels": "intermediate_size", "experts": "moe_intermediate_size"},
        norms=None,
        final_norm=None,
        quirks=("multi-head latent attention (quantized, not pruned)", _SHARED_EXPERTS, "first layers without experts"),
    ),
    replace(
        _LLAMA,
        name="qwen2-moe",
        model_types=("qwen2_moe",),
        experts=_EXPERTS,
        config_names={**_GROUPED_NAMES, "experts": "moe_intermediate_size"},
        norms=("input_layernorm", None),
        final_norm=None,
        quirks=(_SHARED_EXPERTS,),
    ),
    replace(
        _LLAMA,
        name="glm4-moe",
        model_types=("glm4_moe", "ernie4_5_moe", "dots1"),
        experts=_EXPERTS,
        config_names={**_GROUPED_NAMES, "experts": "moe_intermediate_size"},
        norms=("input_layernorm", None),
        final_norm=None,
        quirks=(_SHARED_EXPERTS, "first layers without experts"),
    ),
    replace(
        _LLAMA,
        name="qwen3-next",
        model_types=("qwen3_next",),
        residual="other",
        stateful=True,
        experts=_EXPERTS,
        config_names={**_GROUPED_NAMES, "experts": "moe_intermediate_size"},
        norms=None,
        final_norm=None,
        quirks=(
            _OFFSET_NORMS,
            _SHARED_EXPERTS,
            "gated attention",
            "layers with gated delta rule instead of attention (quantized, not pruned)",
        ),
    ),
    replace(
        _LLAMA,
        name="llama4",
        model_types=("llama4_text",),
        blocks=("layers", "model.layers"),
        feed_forward=FeedForwardPaths(
            input_projections=("feed_forward.up_proj", "feed_forward.gate_proj"), output="feed_forward.down_proj"
        ),
        config_names={},
        norms=("input_layernorm", None),
        final_norm=None,
        quirks=("attention in chunks", "layers without rotary embedding", "experts are quantized, not pruned"),
    ),
    replace(
        _LLAMA, name="glm", model_types=("glm",), feed_forward=_FUSED_GATE_UP, quirks=("partial rotary embedding",)
    ),
    replace(
        _LLAMA,
        name="glm4",
        model_types=("glm4",),
        residual="other",
        feed_forward=_FUSED_GATE_UP,
        quirks=(_POST_NORMS, "partial rotary embedding"),
    ),
    replace(
        _LLAMA,
        name="granite",
        model_types=("granite",),
        residual="other",
        quirks=("multipliers of embeddings, attention, residual and logits",),
    ),
    replace(
        _LLAMA,
        name="granitemoe",
        model_types=("granitemoe",),
        residual="other",
        feed_forward=None,
        experts=replace(_EXPERTS, owner="block_sparse_moe.experts", router="block_sparse_moe.router", published=False),
        config_names={**_GROUPED_NAMES, "experts": "intermediate_size"},
        quirks=("multipliers of embeddings, attention, residual and logits",),
    ),
    replace(
        _LLAMA,
        name="cohere",
        model_types=("cohere", "cohere2"),
        residual="other",
        attention=replace(_LLAMA_ATTENTION, fixed="have a norm each", fixed_if="use_qk_norm"),
        norms=None,
        final_norm=None,
        quirks=(_PARALLEL, "scaled logits", "Cohere 2: layers with a sliding window"),
    ),
    replace(
        _LLAMA,
        name="olmo",
        model_types=("olmo",),
        attention=replace(_LLAMA_ATTENTION, clip="clip_qkv"),
        norms=None,
        final_norm=None,
        quirks=("norms without weights", "clipped Q, K and V"),
    ),
    replace(
        _LLAMA,
        name="olmo2",
        model_types=("olmo2", "olmo3"),
        residual="other",
        attention=replace(_LLAMA_ATTENTION, fixed=_JOINT_NORMS),
        norms=None,
        final_norm=None,
        quirks=(_POST_NORMS, "no norm before a part", "Q/K norms over all heads"),
    ),
    replace(
        _LLAMA,
        name="exaone4",
        model_types=("exaone4",),
        residual="other",
        norms=None,
        final_norm=None,
        quirks=(_POST_NORMS, "no norm before a part", _WINDOWS),
    ),
    replace(
        _LLAMA,
        name="nemotron",
        model_types=("nemotron",),
        attention=replace(_LLAMA_ATTENTION, attributes={"num_heads": "heads", "num_key_value_heads": "kv_heads"}),
        feed_forward=FeedForwardPaths(input_projections=("mlp.up_proj",), output="mlp.down_proj"),
        norms=None,
        final_norm=None,
        quirks=(_OFFSET_NORMS, "feed-forward without a gate", "partial rotary embedding"),
    ),
    replace(
        _LLAMA,
        name="lfm2",
        model_types=("lfm2",),
        residual="other",
        stateful=True,
        attention=replace(_LLAMA_ATTENTION, output="self_attn.out_proj"),
        feed_forward=FeedForwardPaths(
            input_projections=("feed_forward.w3", "feed_forward.w1"), output="feed_forward.w2"
        ),
        config_names={},
        norms=("operator_norm", "ffn_norm"),
        final_norm=None,
        quirks=("layers with a short convolution instead of attention (quantized, not pruned)",),
    ),
    replace(
        _LLAMA,
        name="starcoder2",
        model_types=("starcoder2",),
        feed_forward=FeedForwardPaths(input_projections=("mlp.c_fc",), output="mlp.c_proj"),
        quirks=("layer norms and biases", "feed-forward without a gate"),
    ),
    replace(
        _LLAMA,
        name="stablelm",
        model_types=("stablelm",),
        residual="other",
        attention=replace(
            _LLAMA_ATTENTION,
            attributes={"num_heads": "heads", "num_key_value_heads": "kv_heads"},
            fixed="have a norm each",
            fixed_if="qk_layernorm",
        ),
        norms=None,
        final_norm=None,
        quirks=("layer norms with bias", "optionally parallel", "partial rotary embedding"),
    ),
    Family(
        name="falcon",
        model_types=("falcon",),
        blocks="h",
        residual="other",
        causal=True,
        chain=None,
        attention=AttentionPaths(
            "self_attention",
            *("self_attention.query_key_value",) * 3,
            output="self_attention.dense",
            fixed=_FUSED_QKV,
            interleaved=True,
            interface=False,
        ),
        feed_forward=FeedForwardPaths(input_projections=("mlp.dense_h_to_4h",), output="mlp.dense_4h_to_h"),
        config_names={"ffn_channels": "ffn_hidden_size"},
        quirks=("fused QKV projection", _PARALLEL, "rotary embedding or ALiBi"),
    ),
    Family(
        name="bloom",
        model_types=("bloom",),
        blocks="h",
        residual="other",
        causal=True,
        chain=None,
        attention=AttentionPaths(
            "self_attention",
            *("self_attention.query_key_value",) * 3,
            output="self_attention.dense",
            fixed=_ALIBI,
            interleaved=True,
            interface=False,
        ),
        feed_forward=FeedForwardPaths(input_projections=("mlp.dense_h_to_4h",), output="mlp.dense_4h_to_h"),
        quirks=("ALiBi", "fused QKV projection"),
    ),
    Family(
        name="mpt",
        model_types=("mpt",),
        blocks="blocks",
        residual="other",
        causal=True,
        chain=None,
        attention=AttentionPaths("attn", *("attn.Wqkv",) * 3, output="attn.out_proj", fixed=_ALIBI, interface=False),
        feed_forward=FeedForwardPaths(input_projections=("ffn.up_proj",), output="ffn.down_proj"),
        quirks=("ALiBi", "fused QKV projection"),
    ),
    Family(
        name="gpt-neox",
        model_types=("gpt_neox",),
        blocks="layers",
        residual="other",
        causal=True,
        chain=None,
        attention=AttentionPaths(
            "attention",
            *("attention.query_key_value",) * 3,
            output="attention.dense",
            head_dim="head_size",
            interleaved=True,
        ),
        feed_forward=FeedForwardPaths(input_projections=("mlp.dense_h_to_4h",), output="mlp.dense_4h_to_h"),
        config_names=_PLAIN_NAMES,
        quirks=("parallel blocks", "fused QKV projection", "partial rotary embedding"),
    ),
    Family(
        name="gptj",
        model_types=("gptj",),
        blocks="h",
        residual="other",
        causal=True,
        chain=None,
        attention=AttentionPaths(
            "attn",
            "attn.q_proj",
            "attn.k_proj",
            "attn.v_proj",
            output="attn.out_proj",
            attributes={"num_attention_heads": "heads"},
            interface=False,
        ),
        feed_forward=FeedForwardPaths(input_projections=("mlp.fc_in",), output="mlp.fc_out"),
        config_names={"heads": "n_head", "ffn_channels": "n_inner"},
        quirks=(_PARALLEL, "partial rotary embedding"),
    ),
    Family(
        name="gpt-neo",
        model_types=("gpt_neo",),
        blocks="h",
        residual="pre",
        causal=True,
        chain=None,
        attention=AttentionPaths(
            "attn.attention",
            "attn.attention.q_proj",
            "attn.attention.k_proj",
            "attn.attention.v_proj",
            output="attn.attention.out_proj",
            attributes={"num_heads": "heads"},
            interface=False,
        ),
        feed_forward=FeedForwardPaths(input_projections=("mlp.c_fc",), output="mlp.c_proj"),
        config_names={"heads": "num_heads", "ffn_channels": "intermediate_size"},
        norms=("ln_1", "ln_2"),
        quirks=("layers with local attention", "attention without scaling"),
    ),
    Family(
        name="gpt-bigcode",
        model_types=("gpt_bigcode",),
        blocks="h",
        residual="pre",
        causal=True,
        chain=None,
        attention=AttentionPaths(
            "attn", *("attn.c_attn",) * 3, output="attn.c_proj", fixed=_FUSED_QKV, interleaved=True
        ),
        feed_forward=FeedForwardPaths(input_projections=("mlp.c_fc",), output="mlp.c_proj"),
        config_names={"ffn_channels": "n_inner"},
        quirks=("one KV head", "fused QKV projection"),
    ),
    Family(
        name="mamba",
        model_types=("mamba", "mamba2", "falcon_mamba"),
        blocks="layers",
        residual="other",
        stateful=True,
        causal=True,
        chain=None,
        unquantized=("mixer.x_proj", "mixer.dt_proj"),
        quirks=("state space layers: quantized, not pruned",),
    ),
    Family(
        name="bert",
        model_types=("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie"),
        blocks="encoder.layer",
        residual="post",
        attention=_BERT_ATTENTION,
        feed_forward=FeedForwardPaths(input_projections=("intermediate.dense",), output="output.dense"),
        config_names=_PLAIN_NAMES,
        post_norms=("attention.output.LayerNorm", "output.LayerNorm"),
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
        post_norms=("sa_layer_norm", "output_layer_norm"),
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
        post_norms=("attention.LayerNorm", "output.LayerNorm"),
    ),
    Family(
        name="albert",
        model_types=("albert",),
        blocks="encoder.albert_layer_groups.*.albert_layers",
        residual="other",
        chain=False,
        attention=AttentionPaths(
            "attention",
            "attention.query",
            "attention.key",
            "attention.value",
            output="attention.dense",
            head_dim="attention_head_size",
            attributes={"num_attention_heads": "heads", "all_head_size": "width"},
            removable=False,
        ),
        feed_forward=FeedForwardPaths(input_projections=("ffn",), output="ffn_output"),
        config_names=_PLAIN_NAMES,
        quirks=("all layers share one block",),
    ),
    Family(
        name="deberta",
        model_types=("deberta", "deberta-v2"),
        blocks="encoder.layer",
        residual="other",
        chain=None,
        feed_forward=FeedForwardPaths(input_projections=("intermediate.dense",), output="output.dense"),
        config_names=_PLAIN_NAMES,
        quirks=("disentangled attention (quantized, not pruned)",),
    ),
    Family(
        name="modernbert",
        model_types=("modernbert",),
        blocks="layers",
        residual="pre",
        attention=AttentionPaths("attn", *("attn.Wqkv",) * 3, output="attn.Wo"),
        feed_forward=FeedForwardPaths(input_projections=("mlp.Wi",) * 2, output="mlp.Wo"),
        config_names=_PLAIN_NAMES,
        quirks=("fused QKV and gate-up projections", "local attention"),
    ),
    replace(
        _LLAMA,
        name="nomic-bert",
        model_types=("nomic_bert",),
        residual="post",
        causal=False,
        config_names=_PLAIN_NAMES,
        norms=None,
        final_norm=None,
        embeddings=(),
        quirks=("post-norm", "rotary embedding"),
    ),
    replace(_LLAMA, name="eurobert", model_types=("eurobert",), causal=False, quirks=("bidirectional attention",)),
    Family(
        name="t5",
        model_types=("t5", "mt5", "umt5"),
        blocks=("encoder.block", "decoder.block"),
        residual="other",
        chain=False,
        attention=AttentionPaths(
            "layer.0.SelfAttention",
            "layer.0.SelfAttention.q",
            "layer.0.SelfAttention.k",
            "layer.0.SelfAttention.v",
            output="layer.0.SelfAttention.o",
            head_dim="key_value_proj_dim",
            fixed="share a table of position biases",
        ),
        feed_forward=tuple(
            FeedForwardPaths(tuple(f"{layer}.DenseReluDense.{name}" for name in names), f"{layer}.DenseReluDense.wo")
            for layer in ("layer.1", "layer.2")
            for names in (("wi",), ("wi_1", "wi_0"))
        ),
        quirks=("encoder and decoder with cross attention (quantized, not pruned)", "relative position biases"),
    ),
    Family(
        name="bart",
        model_types=("bart", "mbart", "marian", "pegasus", "whisper"),
        blocks=("encoder.layers", "decoder.layers"),
        residual="other",
        chain=False,
        attention=_BART_ATTENTION,
        feed_forward=FeedForwardPaths(input_projections=("fc1",), output="fc2"),
        quirks=("encoder and decoder with cross attention (quantized, not pruned)", "Whisper: audio encoder"),
    ),
    Family(
        name="wav2vec2",
        model_types=("wav2vec2", "hubert"),
        blocks="encoder.layers",
        residual="other",
        chain=None,
        attention=AttentionPaths(
            "attention",
            "attention.q_proj",
            "attention.k_proj",
            "attention.v_proj",
            output="attention.out_proj",
            attributes={"num_heads": "heads"},
        ),
        feed_forward=FeedForwardPaths(
            input_projections=("feed_forward.intermediate_dense",), output="feed_forward.output_dense"
        ),
        config_names=_PLAIN_NAMES,
        quirks=("audio encoder on convolutions, which stay as they are",),
    ),
    Family(
        name="clip",
        model_types=(
            *("clip", "clip_text_model", "clip_vision_model", "siglip", "siglip_text_model", "siglip_vision_model"),
        ),
        blocks=("text_model.encoder.layers", "vision_model.encoder.layers", "encoder.layers"),
        residual="other",
        chain=False,
        attention=_BART_ATTENTION,
        feed_forward=FeedForwardPaths(input_projections=("mlp.fc1",), output="mlp.fc2"),
        quirks=("text and image encoder",),
    ),
    Family(
        name="vit",
        model_types=("vit", "deit"),
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
        name="dinov2",
        model_types=("dinov2", "dinov2_with_registers"),
        blocks="encoder.layer",
        residual="other",
        attention=AttentionPaths(
            "attention",
            "attention.q_proj",
            "attention.k_proj",
            "attention.v_proj",
            output="attention.o_proj",
            attributes={"num_attention_heads": "heads"},
        ),
        feed_forward=(
            FeedForwardPaths(input_projections=("mlp.fc1",), output="mlp.fc2"),
            FeedForwardPaths(input_projections=("mlp.weights_in",) * 2, output="mlp.weights_out"),
        ),
        quirks=("layer scales",),
    ),
    Family(
        name="swin",
        model_types=("swin",),
        blocks="encoder.layers.*.blocks",
        residual="other",
        chain=False,
        attention=AttentionPaths(
            "attention",
            "attention.q_proj",
            "attention.k_proj",
            "attention.v_proj",
            output="attention.o_proj",
            fixed="have a position bias each",
        ),
        feed_forward=FeedForwardPaths(input_projections=("mlp.fc1",), output="mlp.fc2"),
        quirks=("attention in shifted windows", "stages of different widths"),
    ),
    Family(
        name="convnext",
        model_types=("convnext", "convnextv2"),
        blocks="encoder.stages.*.layers",
        residual="other",
        chain=False,
        feed_forward=FeedForwardPaths(input_projections=("pwconv1",), output="pwconv2"),
        quirks=("depthwise convolutions", "stages of different widths"),
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


GENERIC = "generic"


def has_family(model_type: str) -> bool:
    """Return whether a row describes networks of this type."""
    return any(model_type in family.model_types for family in FAMILIES)


def family_of(model_type: str, *, block_lists: tuple[str, ...] = (), causal: bool = False) -> Family:
    """Return the family of a config's `model_type`; without a row, one that knows nothing but the given block lists."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    return Family(GENERIC, (model_type,), block_lists, "other", causal=causal, chain=None)
