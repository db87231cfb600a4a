"""Attention over pages of clusters by the ordinary paged one: every head of a request is a sequence of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.kv_quant import quantize_qkv
from smelt.kernels.paged import paged_attention
from smelt.serve.engine.attention import Attend
from smelt.serve.engine.per_head.compress import Judge
from smelt.serve.engine.per_head.step import PerHeadBatch


def write(step: PerHeadBatch, layer: int, keys: Tensor, values: Tensor) -> None:
    """Rows of keys and values [tokens, kv_heads, ...] of new tokens, behind what each head holds."""
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


def ragged(step: PerHeadBatch, judge: Judge) -> Attend:
    """Attention that reads and writes pages of clusters; chunks are compressed when it has seen them."""

    def whole(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, _: int | None) -> Tensor:
        asking, new_keys, new_values = quantize_qkv(step.cache.format, queries, keys, values)
        write(step, layer, new_keys, new_values)
        found = attend(step, layer, asking, scale)
        judge(step, layer, queries, scale)
        return found

    return whole
