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
from smelt.serve.engine.attention import Attend
from smelt.serve.engine.per_head.cache import PerHeadCache
from smelt.serve.engine.per_head.step import Chunk, PerHeadBatch


class ChunkCompressor:
    """`turn` and `back` apply the RoPE of a network's queries and its inverse."""

    def __init__(self, turn: RotateFn, back: RotateFn) -> None:
        self.turn, self.back = turn, back

    def __call__(self, step: PerHeadBatch, layer: int, queries: Tensor, scale: float) -> None:
        """Compress the chunks of a step in one layer; queries [tokens, heads, head_dim] are rotated."""
        for chunk in step.chunks:
            mine = queries[chunk.first : chunk.first + chunk.count]
            self._compress(step.cache, layer, chunk, mine.transpose(0, 1)[None], scale)

    def _compress(self, cache: PerHeadCache, layer: int, chunk: Chunk, queries: Tensor, scale: float) -> None:
        here, there = chunk.here[layer], chunk.there[layer]
        pages = [each.view(-1, each.shape[-1]) for each in (cache.keys, cache.values)]
        old = [each.index_select(0, here.flatten()) for each in pages]  # rows, [kv_heads * region, ...]
        keys, values = (each.view(1, *here.shape, each.shape[-1]) for each in old)
        if cache.format is not None:
            keys, values = (
                cache.format.dequantize_keys(keys, queries.dtype),
                cache.format.dequantize(values, queries.dtype),
            )
        scores = self._scores(chunk, queries, keys, values, scale)
        chosen = _chosen(scores, there.shape[1], chunk.judged.window)
        for each, mine in zip(pages, old, strict=True):
            each.index_copy_(0, there.flatten(), mine.index_select(0, chosen))

    def _scores(self, chunk: Chunk, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[kv_heads, region]"""
        scorer, first = chunk.judged.scorer, chunk.end - chunk.judged.region
        plain = self.back(queries, chunk.end - chunk.count) if scorer.needs_unrotated_queries else queries[:, :, :0]
        seen = AttentionInputs(
            keys, values, plain, lambda x, at: self.turn(x, first + at), scale, rotated_queries=queries
        )
        return scorer.scores(seen)[0]


def _chosen(scores: Tensor, most: int, window: int) -> Tensor:
    """The best of each head's tokens before the window, the best first, and then the window: [kv_heads * most], where a
    head's tokens lie behind those of the head before."""
    heads, region = scores.shape
    best = scores[:, : region - window].argsort(dim=1, descending=True, stable=True)[:, : most - window]
    last = torch.arange(region - window, region, device=scores.device).expand(heads, window)
    begin = torch.arange(heads, device=scores.device)[:, None] * region
    return (torch.cat((best, last), dim=1) + begin).flatten()


def write(step: PerHeadBatch, layer: int, keys: Tensor, values: Tensor) -> None:
    """Append keys and values [tokens, kv_heads, ...] of new tokens to what each head holds."""
    cache = step.cache
    heads = cache.cluster[layer]
    places = step.positions[:, None] + cache.shifts[step.slots][:, heads]  # [tokens, kv_heads]
    rows = cache.rows(
        step.slots[:, None].expand_as(places), heads.expand_as(places), cache.column[layer].expand_as(places), places
    ).flatten()
    cache.keys.view(-1, keys.shape[-1]).index_copy_(0, rows, keys.flatten(0, 1))
    cache.values.view(-1, keys.shape[-1]).index_copy_(0, rows, values.flatten(0, 1))


def attend(
    step: PerHeadBatch, layer: int, queries: Tensor, scale: float
) -> Tensor:  # [tokens, heads, width] -> the same
    cache, tokens = step.cache, len(queries)
    heads, columns = cache.cluster[layer], cache.column[layer]
    most = -(-step.longest // cache.size)
    tables = cache.tables[step.piece_slots][:, heads, :most] * cache.columns + columns[:, None].int()
    lengths = step.lengths[:, None] + cache.shifts[step.piece_slots][:, heads]  # [pieces, kv_heads]
    begins = torch.arange(len(heads), device=queries.device, dtype=torch.int32)[:, None] * tokens + step.bounds[:-1]
    pages = AttentionMetadata(
        cu_seqlens_q=torch.cat((begins.flatten(), step.bounds[-1:] * len(heads))),
        seq_lens=lengths.T.flatten().int(),
        block_tables=tables.transpose(0, 1).flatten(0, 1).int().contiguous(),
        slot_mapping=step.positions,
        max_seq_len=step.longest,
        query_lens=step.counts * len(heads),
    )
    grouped = queries.unflatten(1, (len(heads), -1))  # [tokens, kv_heads, group, width]
    flat = grouped.transpose(0, 1).flatten(0, 1)
    found = paged_attention(flat, cache.keys, cache.values, pages, scale, kv_quant=cache.format)
    return found.unflatten(0, (len(heads), tokens)).transpose(0, 1).flatten(1, 2)


def per_head_attention(step: PerHeadBatch, compress: ChunkCompressor) -> Attend:
    """Return the attention function of a step; it compresses chunks once it has read them."""

    def attend_and_compress(
        layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, _: int | None
    ) -> Tensor:
        asking, new_keys, new_values = quantize_qkv(step.cache.format, queries, keys, values)
        write(step, layer, new_keys, new_values)
        found = attend(step, layer, asking, scale)
        compress(step, layer, queries, scale)
        return found

    return attend_and_compress
