"""Attention over a per-head cache; after a layer has read a chunk, each head keeps its best tokens of it.

Every head of a request is a sequence of its own for the ordinary paged attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.kv_quant import quantize_qkv
from smelt.kernels.paged import paged_attention
from smelt.kvcache.eviction.scorer import AttentionInputs
from smelt.kvcache.rope import RotateFn
from smelt.serve.engine.attention import AttentionFn
from smelt.serve.engine.per_head.cache import PerHeadCache
from smelt.serve.engine.per_head.step import EvictionChunk, PerHeadBatch


class ChunkCompressor:
    """`rotate` and `unrotate` apply the RoPE of a network's queries and its inverse."""

    def __init__(self, rotate: RotateFn, unrotate: RotateFn) -> None:
        self.rotate, self.unrotate = rotate, unrotate

    def __call__(self, batch: PerHeadBatch, layer: int, queries: Tensor, scale: float) -> None:
        """Compress the chunks of a batch in one layer; queries [tokens, heads, head_dim] are rotated."""
        for chunk in batch.eviction_chunks:
            chunk_queries = queries[chunk.first_row : chunk.first_row + chunk.count]
            self._compress(batch.cache, layer, chunk, chunk_queries.transpose(0, 1)[None], scale)

    def _compress(self, cache: PerHeadCache, layer: int, chunk: EvictionChunk, queries: Tensor, scale: float) -> None:
        source, target = chunk.source_rows[layer], chunk.target_rows[layer]
        pages = [cache_rows.view(-1, cache_rows.shape[-1]) for cache_rows in (cache.keys, cache.values)]
        region_rows = [
            cache_rows.index_select(0, source.flatten()) for cache_rows in pages
        ]  # rows, [kv_heads * region, ...]
        keys, values = (cache_rows.view(1, *source.shape, cache_rows.shape[-1]) for cache_rows in region_rows)
        if cache.kv_quant is not None:
            keys, values = (cache.kv_quant.dequantize_unrotated(rows, queries.dtype) for rows in (keys, values))
        scores = self._scores(chunk, queries, keys, values, scale)
        selected = _select_tokens(scores, target.shape[1], chunk.eviction.window)
        for cache_rows, old_rows in zip(pages, region_rows, strict=True):
            cache_rows.index_copy_(0, target.flatten(), old_rows.index_select(0, selected))

    def _scores(self, chunk: EvictionChunk, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Score the tokens of a region, [kv_heads, region]."""
        scorer, first = chunk.eviction.scorer, chunk.end - chunk.eviction.region
        unrotated = (
            self.unrotate(queries, chunk.end - chunk.count) if scorer.needs_unrotated_queries else queries[:, :, :0]
        )
        inputs = AttentionInputs(
            keys,
            values,
            unrotated,
            lambda x, position: self.rotate(x, first + position),
            scale,
            rotated_queries=queries,
        )
        return scorer.scores(inputs)[0]


def _select_tokens(scores: Tensor, max_retained: int, window: int) -> Tensor:
    """Return the indices of each head's best tokens before the window, best first, then the window:
    [kv_heads * max_retained], into the regions of all heads concatenated."""
    heads, region = scores.shape
    best = scores[:, : region - window].argsort(dim=1, descending=True, stable=True)[:, : max_retained - window]
    last = torch.arange(region - window, region, device=scores.device).expand(heads, window)
    begin = torch.arange(heads, device=scores.device)[:, None] * region
    return (torch.cat((best, last), dim=1) + begin).flatten()


def write(batch: PerHeadBatch, layer: int, keys: Tensor, values: Tensor) -> None:
    """Append keys and values [tokens, kv_heads, ...] of new tokens to each head's cache."""
    cache = batch.cache
    heads = cache.cluster[layer]
    positions = batch.positions[:, None] + cache.seq_len_offsets[batch.slots][:, heads]  # [tokens, kv_heads]
    rows = cache.rows(
        batch.slots[:, None].expand_as(positions),
        heads.expand_as(positions),
        cache.column[layer].expand_as(positions),
        positions,
    ).flatten()
    cache.keys.view(-1, keys.shape[-1]).index_copy_(0, rows, keys.flatten(0, 1))
    cache.values.view(-1, keys.shape[-1]).index_copy_(0, rows, values.flatten(0, 1))


def attend(
    batch: PerHeadBatch, layer: int, queries: Tensor, scale: float
) -> Tensor:  # [tokens, heads, head_dim] -> same shape
    cache, tokens = batch.cache, len(queries)
    heads, columns = cache.cluster[layer], cache.column[layer]
    max_pages = -(-batch.max_seq_len // cache.block_size)
    tables = (
        cache.block_tables[batch.request_slots][:, heads, :max_pages] * cache.heads_per_page + columns[:, None].int()
    )
    lengths = batch.seq_lens[:, None] + cache.seq_len_offsets[batch.request_slots][:, heads]  # [chunks, kv_heads]
    begins = (
        torch.arange(len(heads), device=queries.device, dtype=torch.int32)[:, None] * tokens + batch.cu_seqlens_q[:-1]
    )
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.cat((begins.flatten(), batch.cu_seqlens_q[-1:] * len(heads))),
        seq_lens=lengths.T.flatten().int(),
        block_tables=tables.transpose(0, 1).flatten(0, 1).int().contiguous(),
        slot_mapping=batch.positions,
        max_seq_len=batch.max_seq_len,
        query_lens=batch.query_lens * len(heads),
    )
    grouped = queries.unflatten(1, (len(heads), -1))  # [tokens, kv_heads, group, head_dim]
    flat = grouped.transpose(0, 1).flatten(0, 1)
    output = paged_attention(flat, cache.keys, cache.values, metadata, scale, kv_quant=cache.kv_quant)
    return output.unflatten(0, (len(heads), tokens)).transpose(0, 1).flatten(1, 2)


def per_head_attention(batch: PerHeadBatch, compress: ChunkCompressor) -> AttentionFn:
    """Return the attention function of a step; it compresses chunks once it has read them."""

    def attend_and_compress(
        layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, _: int | None
    ) -> Tensor:
        new_queries, new_keys, new_values = quantize_qkv(batch.cache.kv_quant, queries, keys, values)
        write(batch, layer, new_keys, new_values)
        output = attend(batch, layer, new_queries, scale)
        compress(batch, layer, queries, scale)
        return output

    return attend_and_compress
