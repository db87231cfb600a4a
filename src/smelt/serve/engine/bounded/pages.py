"""Pots in plain pages: keys and values as the plain cache has them, and the number of the token that lies there, for
each head. All heads hold as many tokens, each its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from smelt.kernels.paged import allocate_kv_pages
from smelt.kvcache.streaming.infinipot import InfiniPotCompressor
from smelt.models.anatomy import Anatomy
from smelt.serve.engine.attention import PagedCache, block_bytes


class BoundedCachePages:
    """`rows` are places in the pages, block * size + offset, [tokens], int64: those of one pot, in order."""

    def __init__(self, cache: PagedCache, blocks: int, dtype: torch.dtype) -> None:
        self.cache = cache
        self.dtype = dtype
        first = next(iter(cache.keys.values()))
        shape = (blocks, cache.size, len(cache.keys), first.shape[2])
        self.numbers = allocate_kv_pages(shape, torch.int32, first.device)  # [blocks, size, layers, kv heads]

    def number(self, rows: Tensor, numbers: Tensor) -> None:
        """Tokens with these numbers [tokens] are laid there, for all heads."""
        new = numbers.to(torch.int32)[:, None, None].expand(-1, *self.numbers.shape[2:])
        self.numbers.flatten(0, 1).index_copy_(0, rows, new)

    def keys(self, layer: int, rows: Tensor) -> Tensor:  # [kv_heads, tokens, width]
        found, held = self.cache.keys[layer].flatten(0, 1)[rows].transpose(0, 1), self.cache.rows[layer]
        return found if held is None else held.dequantize_keys(found, self.dtype)

    def keep(
        self, rows: Tensor, attention: Mapping[int, Tensor], novel: Tensor, count: int, distiller: InfiniPotCompressor
    ) -> None:
        """Of a full pot each head keeps `count` tokens, moved together: from the attention of the catalyst prompt in
        each layer [kv_heads, tokens], and the numbers of the novel tokens [novel]."""
        numbers = self.numbers.flatten(0, 1)
        held = numbers[rows]  # [tokens, layers, kv_heads]
        for at, layer in enumerate(self.cache.keys):
            mine = held[:, at].T.long()
            places = distiller.select(attention[layer], mine, novel, count)  # [kv_heads, count]
            keys = distiller.rerotate(_picked(self.keys(layer, rows), places), places)
            if (form := self.cache.rows[layer]) is not None:
                keys = form.quantize(form.rotate(keys))
            values = _picked(self.cache.values[layer].flatten(0, 1)[rows].transpose(0, 1), places)
            for cache, kept in ((self.cache.keys[layer], keys), (self.cache.values[layer], values)):
                cache.flatten(0, 1).index_copy_(0, rows[:count], kept.transpose(0, 1).contiguous())
            held[:count, at] = mine.gather(1, places).T.to(torch.int32)
        numbers.index_copy_(0, rows[:count], held[:count])

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Whole blocks, from and to; all of them are read before any is written."""
        if copies:
            source, target = torch.tensor(copies, device=self.numbers.device).T
            for pages in (*self.cache.keys.values(), *self.cache.values.values(), self.numbers):
                pages[target] = pages[source]


def _picked(rows: Tensor, places: Tensor) -> Tensor:  # [kv_heads, tokens, ...], [kv_heads, count]
    return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))


def bounded_block_bytes(anatomy: Anatomy, size: int, dtype: torch.dtype, kind: str | None = None) -> int:
    """What one block takes in all layers."""
    heads = sum(part.units for part in anatomy.parts if part.kind == "heads")
    return block_bytes(anatomy, size, dtype, kind) + size * heads * torch.int32.itemsize
