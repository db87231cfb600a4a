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
    """`rows` are slots in the pages, block * size + offset, [tokens], int64: those of one request, in order."""

    def __init__(self, cache: PagedCache, blocks: int, dtype: torch.dtype) -> None:
        self.cache = cache
        self.dtype = dtype
        first = next(iter(cache.keys.values()))
        shape = (blocks, cache.size, len(cache.keys), first.shape[2])
        self.numbers = allocate_kv_pages(shape, torch.int32, first.device)  # [blocks, size, layers, kv heads]

    def number(self, rows: Tensor, numbers: Tensor) -> None:
        """Record the text positions [tokens] of new tokens, for all heads."""
        new = numbers.to(torch.int32)[:, None, None].expand(-1, *self.numbers.shape[2:])
        self.numbers.flatten(0, 1).index_copy_(0, rows, new)

    def keys(self, layer: int, rows: Tensor) -> Tensor:  # [kv_heads, tokens, head_dim]
        keys, kv_quant = self.cache.keys[layer].flatten(0, 1)[rows].transpose(0, 1), self.cache.rows[layer]
        return keys if kv_quant is None else kv_quant.dequantize_keys(keys, self.dtype)

    def keep(
        self, rows: Tensor, attention: Mapping[int, Tensor], novel: Tensor, count: int, distiller: InfiniPotCompressor
    ) -> None:
        """Keep `count` tokens per head of a full cache and compact them, chosen by the catalyst prompt's attention in
        each layer [kv_heads, tokens] and the text positions of novel tokens [novel]."""
        numbers = self.numbers.flatten(0, 1)
        cached_numbers = numbers[rows]  # [tokens, layers, kv_heads]
        for index, layer in enumerate(self.cache.keys):
            layer_numbers = cached_numbers[:, index].T.long()
            selected = distiller.select(attention[layer], layer_numbers, novel, count)  # [kv_heads, count]
            keys = distiller.rerotate(_picked(self.keys(layer, rows), selected), selected)
            if (kv_quant := self.cache.rows[layer]) is not None:
                keys = kv_quant.quantize(kv_quant.rotate(keys))
            values = _picked(self.cache.values[layer].flatten(0, 1)[rows].transpose(0, 1), selected)
            for cache, retained in ((self.cache.keys[layer], keys), (self.cache.values[layer], values)):
                cache.flatten(0, 1).index_copy_(0, rows[:count], retained.transpose(0, 1).contiguous())
            cached_numbers[:count, index] = layer_numbers.gather(1, selected).T.to(torch.int32)
        numbers.index_copy_(0, rows[:count], cached_numbers[:count])

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy complete blocks (from, to); all are read before any is written."""
        if copies:
            source, target = torch.tensor(copies, device=self.numbers.device).T
            for pages in (*self.cache.keys.values(), *self.cache.values.values(), self.numbers):
                pages[target] = pages[source]


def _picked(rows: Tensor, places: Tensor) -> Tensor:  # [kv_heads, tokens, ...], [kv_heads, count]
    return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))


def bounded_block_bytes(anatomy: Anatomy, size: int, dtype: torch.dtype, kind: str | None = None) -> int:
    """Return the bytes of one block over all layers."""
    heads = sum(part.units for part in anatomy.parts if part.kind == "heads")
    return block_bytes(anatomy, size, dtype, kind) + size * heads * torch.int32.itemsize
