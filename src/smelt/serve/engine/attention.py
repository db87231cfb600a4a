"""Where the paged cache meets the network: transformers asks for attention by name, and this is ours.

The network is run as it is, so that pruned layers, layers without attention and quantised ones need nothing of their
own. It is called with all tokens of a step as one long sequence; what belongs to whom is in the pages of the moment.
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

NAME = "smelt-paged"
# Of a layer, from queries, keys and values [tokens, heads, width], the scale of their products, and the window
Attend = Callable[[int, Tensor, Tensor, Tensor, float, int | None], Tensor]
_moment = local()


@dataclass(frozen=True)
class PagedCache:
    """KV cache of each layer, [num_blocks, block_size, kv_heads, head_dim], or bytes of rows in the layer's format.
    Layers that lost heads hold less."""

    keys: dict[int, Tensor]  # layer -> pages
    values: dict[int, Tensor]
    size: int  # tokens a block
    rows: dict[int, KVQuantFormat | None]

    @classmethod
    def empty(
        cls,
        anatomy: Anatomy,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str | None = None,
    ) -> PagedCache:
        """`kind`: the name of a row format, or None for the network's own numbers."""
        shapes = _layers(anatomy)
        rows = {layer: rows_of(kind, width) for layer, (_, width) in shapes.items()}

        def pages() -> dict[int, Tensor]:
            found = {}
            for layer, (heads, width) in shapes.items():
                last, held = row_layout(rows[layer], width, dtype)
                found[layer] = allocate_kv_pages((num_blocks, block_size, heads, last), held, device)
            return found

        return cls(pages(), pages(), block_size, rows)

    def layer(self, index: int) -> LayerKVPages:
        return LayerKVPages(self.keys[index], self.values[index], self.keys[index].shape[2], kv_quant=self.rows[index])


def rows_of(kind: str | None, width: int) -> KVQuantFormat | None:
    return None if kind is None else KVQuantFormat.for_head_dim(kind, width)


def block_bytes(anatomy: Anatomy, block_size: int, dtype: torch.dtype, kind: str | None = None) -> int:
    """What one block takes in all layers, keys and values together."""
    return sum(2 * block_size * heads * row_bytes(width, dtype, kind) for heads, width in _layers(anatomy).values())


def row_bytes(width: int, dtype: torch.dtype, kind: str | None) -> int:
    """What a head's key or value of a token takes."""
    last, held = row_layout(rows_of(kind, width), width, dtype)
    return last * held.itemsize


def _layers(anatomy: Anatomy) -> dict[int, tuple[int, int]]:
    """Key/value heads and their block_size, for every layer that has attention."""
    parts = [part for part in anatomy.parts if part.kind == "heads" and part.units]
    if not anatomy.family.causal:
        raise ModelError("only language models that read from left to right can be served.")
    return {part.block: (part.units, part.head_dim) for part in parts}


def paged(cache: PagedCache, pages: AttentionMetadata) -> Attend:
    """Attention that reads and writes this cache."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
        key_pages, value_pages, rows = cache.keys[layer], cache.values[layer], cache.rows[layer]
        queries, keys, values = quantize_qkv(rows, queries, keys, values)
        store_kv(keys, values, key_pages, value_pages, pages.slot_mapping)
        return paged_attention(queries, key_pages, value_pages, pages, scale, window, rows)

    return attend


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Inside, this is the network's attention."""
    _moment.attend = attend
    try:
        yield
    finally:
        del _moment.attend


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers calls it: [1, heads, tokens, head block_size] each; gives [1, tokens, heads, head block_size]."""
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise ModelError("this family's attention has caps or sinks, which the paged cache does not know.")
    layer: Any = module.layer_idx
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    return _moment.attend(layer, queries, keys, values, scale, options.get("sliding_window"))[None], None


AttentionInterface.register(NAME, _attention)
