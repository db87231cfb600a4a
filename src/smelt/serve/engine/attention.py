"""Attention over the paged KV cache, registered with transformers by name.

The network runs eagerly, so pruned layers, layers without attention and quantized ones need no special handling. It is
called with all tokens of a step as one sequence; the attention metadata says which tokens belong to which request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from smelt.errors import ModelError
from smelt.kernels.attention_metadata import AttentionMetadata, LayerKVPages
from smelt.kernels.kv_quant import KVQuantFormat, quantize_qkv, row_layout
from smelt.kernels.paged import allocate_kv_pages, paged_attention, store_kv
from smelt.models.anatomy import Anatomy

ATTN_IMPLEMENTATION = "smelt-paged"
# (layer, queries, keys, values [tokens, heads, head_dim], softmax scale, sliding window) -> [tokens, heads, head_dim]
AttentionFn = Callable[[int, Tensor, Tensor, Tensor, float, int | None], Tensor]
_context = local()


@dataclass(frozen=True)
class PagedCache:
    """KV cache of each layer, [num_blocks, block_size, kv_heads, head_dim], or bytes of quantized rows. Layers with
    pruned heads have fewer kv_heads."""

    keys: dict[int, Tensor]  # layer -> pages
    values: dict[int, Tensor]
    block_size: int
    kv_quant: dict[int, KVQuantFormat | None]  # layer -> format of quantized rows

    @classmethod
    def empty(
        cls,
        anatomy: Anatomy,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache_dtype: str | None = None,
    ) -> PagedCache:
        """Allocate a cache with quantized rows of `kv_cache_dtype`; None: rows of the model's own dtype."""
        shapes = _attention_layers(anatomy)
        kv_quant = {layer: kv_quant_format(kv_cache_dtype, head_dim) for layer, (_, head_dim) in shapes.items()}

        def pages() -> dict[int, Tensor]:
            pages_by_layer = {}
            for layer, (num_kv_heads, head_dim) in shapes.items():
                row_size, row_dtype = row_layout(kv_quant[layer], head_dim, dtype)
                pages_by_layer[layer] = allocate_kv_pages(
                    (num_blocks, block_size, num_kv_heads, row_size), row_dtype, device
                )
            return pages_by_layer

        return cls(pages(), pages(), block_size, kv_quant)

    def layer(self, index: int) -> LayerKVPages:
        return LayerKVPages(
            self.keys[index], self.values[index], self.keys[index].shape[2], kv_quant=self.kv_quant[index]
        )


def kv_quant_format(kv_cache_dtype: str | None, head_dim: int) -> KVQuantFormat | None:
    """Return how a row of the KV cache is quantized; None: it has the model's dtype."""
    return None if kv_cache_dtype is None else KVQuantFormat.for_head_dim(kv_cache_dtype, head_dim)


def block_bytes(anatomy: Anatomy, block_size: int, dtype: torch.dtype, kv_cache_dtype: str | None = None) -> int:
    """Return the KV cache bytes of one block over all layers."""
    return sum(
        2 * block_size * num_kv_heads * row_bytes(head_dim, dtype, kv_cache_dtype)
        for num_kv_heads, head_dim in _attention_layers(anatomy).values()
    )


def row_bytes(head_dim: int, dtype: torch.dtype, kv_cache_dtype: str | None) -> int:
    """Return the bytes of one head's key or value of one token."""
    row_size, row_dtype = row_layout(kv_quant_format(kv_cache_dtype, head_dim), head_dim, dtype)
    return row_size * row_dtype.itemsize


def _attention_layers(anatomy: Anatomy) -> dict[int, tuple[int, int]]:
    """Return the number of KV heads and head_dim of every layer that has attention."""
    parts = [part for part in anatomy.parts if part.kind == "heads" and part.units]
    if not anatomy.family.causal:
        raise ModelError("only causal language models can be served.")
    return {part.block: (part.units, part.head_dim) for part in parts}


def paged_attention_fn(cache: PagedCache, metadata: AttentionMetadata) -> AttentionFn:
    """Return attention that reads and writes this cache."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
        key_pages, value_pages, kv_quant = cache.keys[layer], cache.values[layer], cache.kv_quant[layer]
        queries, keys, values = quantize_qkv(kv_quant, queries, keys, values)
        store_kv(keys, values, key_pages, value_pages, metadata.slot_mapping)
        return paged_attention(queries, key_pages, value_pages, metadata, scale, window, kv_quant)

    return attend


@contextmanager
def use_attention(attention_fn: AttentionFn) -> Iterator[None]:
    """Use this attention function in the network inside the context, in this thread."""
    _context.attention_fn = attention_fn
    try:
        yield
    finally:
        del _context.attention_fn


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise ModelError("this model's attention has soft-capping or sinks, which paged attention does not support.")
    layer: Any = module.layer_idx
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return _context.attention_fn(layer, queries, keys, values, scale, options.get("sliding_window"))[None], None


AttentionInterface.register(ATTN_IMPLEMENTATION, _attention)
