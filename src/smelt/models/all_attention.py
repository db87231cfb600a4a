"""The all-attention decoder: self-attention and feed-forward in one layer (Sukhbaatar et al., arXiv 1907.01470).

Every head attends to the context and, in the same softmax, to learned persistent keys and values, which take the place
of the feed-forward. A head that is removed takes its share of everything with it. With the relative positions of
Transformer-XL (Dai et al., ACL 2019), scores of a query q against keys K, positions R and persistent keys M_K are

    [(q + u) K^T + rel_shift((q + v) R^T) ; q (sqrt(head_dim) M_K)^T] / sqrt(head_dim)

and the output is the softmax times [V ; sqrt(N) M_V]. Unlike Transformer-XL, training windows have no memory of the
window before; generation uses a KV cache.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

MODEL_TYPE = "all_attention"
_POSITION_BASE = 10000.0


class AllAttentionConfig(PreTrainedConfig):
    """The config of an all-attention decoder; the defaults are a network of 4 million parameters."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 256,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 8,
        head_dim: int | None = None,  # None: hidden_size over num_attention_heads
        num_persistent_vectors: int = 512,  # of each head; 0: plain attention without a feed-forward
        position_size: int | None = None,  # of an encoded distance between tokens; None: hidden_size
        max_position_embeddings: int = 1024,  # positions are relative, so nothing is allocated for them
        dropout: float = 0.0,  # of the embeddings and of what each layer adds
        attention_dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = True,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        position_size = hidden_size if position_size is None else position_size
        if position_size % 2:
            raise ValueError("position_size must be even: distances are encoded by pairs of sine and cosine")
        if head_dim is None and hidden_size % num_attention_heads:
            raise ValueError("hidden_size must be a multiple of num_attention_heads, unless head_dim is given")
        if num_persistent_vectors < 0:
            raise ValueError("num_persistent_vectors must not be negative")
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.num_persistent_vectors, self.position_size = num_persistent_vectors, position_size
        self.max_position_embeddings = max_position_embeddings
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.layer_norm_eps, self.initializer_range = layer_norm_eps, initializer_range
        self.tie_word_embeddings = tie_word_embeddings
        self.use_cache = use_cache
        super().__init__(**kwargs)


class AllAttention(nn.Module):
    """Attention to the context and to persistent vectors; parameters beside the projections have one slice per head."""

    def __init__(self, config: AllAttentionConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.layer_idx, self.head_dim = layer_idx, head_dim
        self.attention_dropout = config.attention_dropout
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.position_weight = nn.Parameter(
            torch.empty(heads, head_dim, config.position_size)
        )  # from encoded distances to R
        self.content_bias = nn.Parameter(torch.zeros(heads, head_dim))  # u
        self.position_bias = nn.Parameter(torch.zeros(heads, head_dim))  # v
        size = config.num_persistent_vectors
        self.persistent_keys = nn.Parameter(torch.empty(heads, size, head_dim))  # M_K
        self.persistent_values = nn.Parameter(torch.empty(heads, size, head_dim))  # M_V

    def forward(
        self, hidden_states: Tensor, visible: Tensor, distances: Tensor, past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attend from hidden states [batch, queries, hidden].

        `visible` [batch or 1, 1, queries, keys] is true where a query sees a key; `distances` [keys, position_size]
        encodes the distances keys - 1 to 0.
        """
        queries, keys, values = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        positions = torch.einsum("pc,hdc->hpd", distances.to(queries.dtype), self.position_weight)
        content = (queries + self.content_bias[:, None]) @ keys.mT
        content = content + relative_shift((queries + self.position_bias[:, None]) @ positions.mT)
        content = content.masked_fill(~visible, torch.finfo(content.dtype).min)
        persistent = queries @ (math.sqrt(self.head_dim) * self.persistent_keys).mT
        scores = torch.cat([content, persistent], dim=-1) / math.sqrt(self.head_dim)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
        weights = F.dropout(weights, self.attention_dropout, self.training)
        length, size = keys.shape[2], self.persistent_values.shape[1]
        outputs = weights[..., :length] @ values + weights[..., length:] @ (math.sqrt(size) * self.persistent_values)
        return self.o_proj(outputs.transpose(1, 2).flatten(2)), None


def relative_shift(scores: Tensor) -> Tensor:
    """Align scores by distance with keys: [..., queries, distances from keys - 1 to 0] -> [..., queries, keys].

    Entries of keys after the query are meaningless, and have to be masked.
    """
    *batch, queries, keys = scores.shape
    padded = F.pad(scores, (1, 0)).reshape(*batch, keys + 1, queries)
    return padded[..., 1:, :].reshape(*batch, queries, keys)


def encode_distances(length: int, size: int, device: torch.device) -> Tensor:
    """Encode the distances length - 1 to 0 by sines and cosines: [length, size] in float32."""
    distances = torch.arange(length - 1, -1, -1, device=device, dtype=torch.float32)
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    angles = distances[:, None] / _POSITION_BASE**exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class AllAttentionLayer(nn.Module):
    """A pre-norm residual block with all-attention and nothing else."""

    def __init__(self, config: AllAttentionConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = AllAttention(config, layer_idx)
        self.dropout = config.dropout

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        added, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + F.dropout(added, self.dropout, self.training)


class AllAttentionPreTrainedModel(PreTrainedModel):
    """Initialization, shared by the decoder with and without a head."""

    config_class = AllAttentionConfig
    base_model_prefix = "model"
    _no_split_modules = ["AllAttentionLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AllAttention):
            nn.init.normal_(module.position_weight, std=self.config.initializer_range)
            nn.init.zeros_(module.content_bias)
            nn.init.zeros_(module.position_bias)
            for vectors in (module.persistent_keys, module.persistent_values):
                nn.init.normal_(vectors, std=self.config.hidden_size**-0.5)


class AllAttentionModel(AllAttentionPreTrainedModel):
    """Embeddings, blocks and the final norm."""

    def __init__(self, config: AllAttentionConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(AllAttentionLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """Compute hidden states [batch, tokens, hidden]; `attention_mask` [batch, past + tokens] is 0 at padding."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        queries, device = inputs_embeds.shape[1], inputs_embeds.device
        visible = torch.ones(queries, past + queries, dtype=torch.bool, device=device).tril(past)[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, : past + queries].bool()
        distances = encode_distances(past + queries, self.config.position_size, device)
        hidden_states = F.dropout(inputs_embeds, self.config.dropout, self.training)
        for layer in self.layers:
            hidden_states = layer(hidden_states, visible=visible, distances=distances, past_key_values=past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class AllAttentionForCausalLM(AllAttentionPreTrainedModel, GenerationMixin):
    """An all-attention decoder with a head over the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: AllAttentionConfig) -> None:
        super().__init__(config)
        self.model = AllAttentionModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        use_cache: bool | None = None, logits_to_keep: int | Tensor = 0, **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Compute logits [batch, tokens, vocab_size]; with `labels` also the loss of the next token."""
        outputs = self.model(input_ids, attention_mask, past_key_values, inputs_embeds, use_cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)


def register() -> None:
    """Make transformers build these networks from their config."""
    AutoConfig.register(MODEL_TYPE, AllAttentionConfig, exist_ok=True)
    AutoModel.register(AllAttentionConfig, AllAttentionModel, exist_ok=True)
    AutoModelForCausalLM.register(AllAttentionConfig, AllAttentionForCausalLM, exist_ok=True)
