"""Reference attention with per-head eviction: evicted tokens are masked, not freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from smelt.kernels.paged import causal_mask

NAME = "smelt-kept"
AttentionHook = Callable[[int, Tensor, Tensor, Tensor], None]  # layer; queries, keys and values as attention gets them
_context = local()


@contextmanager
def masked_attention(
    network: PreTrainedModel, retained: Tensor | None = None, hook: AttentionHook | None = None
) -> Iterator[None]:
    """Mask evicted tokens of the cached prompt and call `hook` with the inputs of every attention layer.

    `retained` [layers, batch, kv_heads, tokens] covers the first tokens of the cache; later ones are visible."""
    previous = network.config._attn_implementation
    network.set_attn_implementation(NAME)
    _context.retained, _context.hook = retained, hook
    try:
        yield
    finally:
        network.set_attn_implementation(previous)
        del _context.retained, _context.hook


@contextmanager
def default_attention(network: PreTrainedModel) -> Iterator[None]:
    """Use the attention of transformers in a network that an engine has patched."""
    previous = network.config._attn_implementation
    patched = str(previous).startswith("smelt-")
    if patched:
        network.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if patched:
            network.set_attn_implementation(previous)


def has_full_attention(config: PreTrainedConfig) -> bool:
    """Return whether every layer attends to all earlier tokens; sliding-window layers do not."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return layer_types == {"full_attention"} and not getattr(config, "sliding_window", None)


def softmax_scale(attention: Any, head_dim: int) -> float:
    """Return the scale of an attention module's logits."""
    return float(getattr(attention, "scaling", None) or head_dim**-0.5)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: queries [batch, heads, new, head_dim], keys and values of all
    tokens."""
    layer: Any = module.layer_idx
    if _context.hook is not None:
        _context.hook(layer, query, key, value)
    new, tokens = query.shape[2], key.shape[2]
    mask = causal_mask(new, tokens, options.get("sliding_window"), query.device)  # [new, tokens]
    if _context.retained is not None:
        retained = F.pad(_context.retained[layer], (0, tokens - _context.retained.shape[-1]), value=True)
        per_query_head = retained.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        mask = mask & per_query_head[:, :, None]  # [batch, heads, new, tokens]
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
