"""Attention of prompt chunks over pages: Hopper's kernel where it can compute them, Triton's otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.gpu import hopper_attention
from smelt.kernels.gpu.paged import QueryTiles, paged_prefill
from smelt.kernels.gpu.rows import dequantize_pages, unrotate_output
from smelt.kernels.kv_quant import KVQuantFormat

MIN_DEQUANTIZED_QUERIES = 128  # tokens of a chunk from which on dequantizing its KV cache first is faster
MAX_DEQUANTIZED_BYTES = 256 * 2**20  # of one layer


@dataclass(frozen=True)
class PageList:
    """The blocks of all chunks of a step, one after another, for a copy of them."""

    blocks: Tensor  # [pages], int32
    block_tables: Tensor  # [requests, max blocks], int32: indices into `blocks`


class PrefillAttention:
    """Attention of the chunks of one step, the same for all layers.

    `count_tiles` returns the number of query tiles of so many tokens, or an upper bound of it. With `pages`, quantized
    pages may be dequantized first; without, they are read as they are.
    """

    def __init__(
        self, metadata: AttentionMetadata, tiles: QueryTiles, count_tiles: Callable[[int], int],
        hopper_tiles: hopper_attention.PrefillTiles, pages: PageList | None = None,
    ) -> None:  # fmt: skip
        self.metadata, self.tiles, self.count_tiles = metadata, tiles, count_tiles
        self.hopper_tiles, self.pages = hopper_tiles, pages
        self._query_tiles: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None,
        kv_quant: KVQuantFormat | None, sinks: Tensor | None = None,
    ) -> Tensor:  # [tokens, heads, head_dim] -> the same shape  # fmt: skip
        metadata = self.metadata
        if sinks is not None:
            return paged_prefill(
                queries, keys, values, metadata, scale, window, tiles=self.tiles, kv_quant=kv_quant, sinks=sinks
            )
        if kv_quant is not None and self._dequantizes(queries, keys, kv_quant):
            assert self.pages is not None
            keys, values = dequantize_pages(keys, values, self.pages.blocks, kv_quant, queries.dtype)
            metadata = replace(metadata, block_tables=self.pages.block_tables)
            return unrotate_output(self._attend(queries, keys, values, metadata, scale, window, None), kv_quant)
        return self._attend(queries, keys, values, metadata, scale, window, kv_quant)

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, scale: float,
        window: int | None, kv_quant: KVQuantFormat | None,
    ) -> Tensor:  # fmt: skip
        if kv_quant is not None or not hopper_attention.supports_prefill(queries, keys):
            return paged_prefill(queries, keys, values, metadata, scale, window, tiles=self.tiles, kv_quant=kv_quant)
        tokens = self.hopper_tiles.tokens(queries.shape[1], keys.shape[2])
        if tokens not in self._query_tiles:
            self._query_tiles[tokens] = query_tiles(metadata.cu_seqlens_q, tokens, self.count_tiles(tokens))
        return hopper_attention.prefill(
            queries, keys, values, metadata, *self._query_tiles[tokens], scale, window, self.hopper_tiles
        )

    def _dequantizes(self, queries: Tensor, keys: Tensor, kv_quant: KVQuantFormat) -> bool:
        if self.pages is None or max(self.metadata.query_lens, default=0) < MIN_DEQUANTIZED_QUERIES:
            return False
        _, block_size, kv_heads, _ = keys.shape
        shape = (len(self.pages.blocks), block_size, kv_heads, kv_quant.head_dim)
        like = torch.empty(shape, dtype=queries.dtype, device="meta")
        return 2 * like.nbytes <= MAX_DEQUANTIZED_BYTES and hopper_attention.supports_prefill(queries, like)


def query_tiles(cu_seqlens_q: Tensor, tokens: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the request and the first token of each of `count` tiles of queries, int32, computed on the device.

    Tiles behind the last one begin behind the last token of their request."""
    counts = cu_seqlens_q.diff()
    ends = ((counts + (tokens - 1)) // tokens).cumsum(0, dtype=torch.int32)
    tile = torch.arange(count, dtype=torch.int32, device=cu_seqlens_q.device)
    request = torch.searchsorted(ends, tile, right=True).clamp(max=len(counts) - 1)
    starts = torch.nn.functional.pad(ends, (1, 0))[request]
    return request.int(), ((tile - starts) * tokens).int()
