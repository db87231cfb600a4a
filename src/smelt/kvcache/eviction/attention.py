"""Attention in which each head may have lost tokens of the prompt: the plain reference that everything else must equal.

Nothing is freed here: lost tokens are hidden by a mask. Positions stay those of the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from smelt.kernels.paged import causal_mask

NAME = "smelt-kept"
Listen = Callable[[int, Tensor, Tensor, Tensor], None]  # layer; queries, keys, values as attention gets them
_moment = local()


@contextmanager
def attending(network: PreTrainedModel, kept: Tensor | None = None, listen: Listen | None = None) -> Iterator[None]:
    """Inside, the first tokens of the cache are seen only where they are kept [layers, batch, kv_heads, tokens], and
    `listen` is told what every layer's attention gets."""
    before = network.config._attn_implementation
    network.set_attn_implementation(NAME)
    _moment.kept, _moment.listen = kept, listen
    try:
        yield
    finally:
        network.set_attn_implementation(before)
        del _moment.kept, _moment.listen


@contextmanager
def ordinary(network: PreTrainedModel) -> Iterator[None]:
    """Inside, a network that an engine made its own attends as transformers has it."""
    before = network.config._attn_implementation
    ours = str(before).startswith("smelt-")
    if ours:
        network.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if ours:
            network.set_attn_implementation(before)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers calls it: queries [batch, heads, new, width], keys and values of all tokens so far."""
    layer: Any = module.layer_idx
    if _moment.listen is not None:
        _moment.listen(layer, query, key, value)
    new, tokens = query.shape[2], key.shape[2]
    mask = causal_mask(new, tokens, options.get("sliding_window"), query.device)  # [new, tokens]
    if _moment.kept is not None:
        kept = F.pad(_moment.kept[layer], (0, tokens - _moment.kept.shape[-1]), value=True)
        seen = kept.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        mask = mask & seen[:, :, None]  # [batch, heads, new, tokens]
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
