"""Bounded KV caches in ordinary pages, with the text position of each cached token per head. Each head selects its own
tokens, all heads the same number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from smelt.kernels.paged import allocate_kv_pages
from smelt.kvcache.streaming.infinipot import InfiniPotCompressor
from smelt.models.anatomy import Anatomy
from smelt.serve.engine.attention import PagedCache, block_bytes


class BoundedCachePages:
    """`rows` are slots in the pages, block * block_size + offset, [tokens], int64: those of one request, in order."""

    def __init__(self, cache: PagedCache, num_blocks: int, dtype: torch.dtype) -> None:
        self.cache = cache
        self.dtype = dtype
        first = next(iter(cache.keys.values()))
        # Positions in the text, [blocks, block_size, layers, kv_heads]
        shape = (num_blocks, cache.block_size, len(cache.keys), first.shape[2])
        self.token_indices = allocate_kv_pages(shape, torch.int32, first.device)

    def record(self, rows: Tensor, token_indices: Tensor) -> None:
        """Record the text positions [tokens] of new tokens, for all heads."""
        new = token_indices.to(torch.int32)[:, None, None].expand(-1, *self.token_indices.shape[2:])
        self.token_indices.flatten(0, 1).index_copy_(0, rows, new)

    def keys(self, layer: int, rows: Tensor) -> Tensor:  # [kv_heads, tokens, head_dim]
        keys, kv_quant = self.cache.keys[layer].flatten(0, 1)[rows].transpose(0, 1), self.cache.kv_quant[layer]
        return keys if kv_quant is None else kv_quant.dequantize_unrotated(keys, self.dtype)

    def keep(
        self, rows: Tensor, attention: Mapping[int, Tensor], novel: Tensor, count: int, compressor: InfiniPotCompressor
    ) -> None:
        """Keep `count` tokens per head of a full cache and compact them, chosen by the catalyst prompt's attention in
        each layer [kv_heads, tokens] and the text positions of novel tokens [novel]."""
        token_indices = self.token_indices.flatten(0, 1)
        cached_indices = token_indices[rows]  # [tokens, layers, kv_heads]
        for index, layer in enumerate(self.cache.keys):
            layer_indices = cached_indices[:, index].T.long()
            selected = compressor.select(attention[layer], layer_indices, novel, count)  # [kv_heads, count]
            keys = compressor.rerotate(_gather_tokens(self.keys(layer, rows), selected), selected)
            if (kv_quant := self.cache.kv_quant[layer]) is not None:
                keys = kv_quant.quantize(kv_quant.rotate(keys))
            values = _gather_tokens(self.cache.values[layer].flatten(0, 1)[rows].transpose(0, 1), selected)
            for cache, retained in ((self.cache.keys[layer], keys), (self.cache.values[layer], values)):
                cache.flatten(0, 1).index_copy_(0, rows[:count], retained.transpose(0, 1).contiguous())
            cached_indices[:count, index] = layer_indices.gather(1, selected).T.to(torch.int32)
        token_indices.index_copy_(0, rows[:count], cached_indices[:count])

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy complete blocks (from, to); all are read before any is written."""
        if copies:
            source, target = torch.tensor(copies, device=self.token_indices.device).T
            for pages in (*self.cache.keys.values(), *self.cache.values.values(), self.token_indices):
                pages[target] = pages[source]


def _gather_tokens(rows: Tensor, indices: Tensor) -> Tensor:  # [kv_heads, tokens, ...], [kv_heads, count]
    return rows.gather(1, indices[..., None].expand(-1, -1, rows.shape[-1]))


def bounded_block_bytes(
    anatomy: Anatomy, block_size: int, dtype: torch.dtype, kv_cache_dtype: str | None = None
) -> int:
    """Return the bytes of one block over all layers."""
    heads = sum(part.units for part in anatomy.parts if part.kind == "heads")
    return block_bytes(anatomy, block_size, dtype, kv_cache_dtype) + block_size * heads * torch.int32.itemsize
