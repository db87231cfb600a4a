"""Sparse page attention of one layer: prefill attends to all pages of its request, decode to selected ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smelt.kernels import paged
from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.kv_quant import KVQuantFormat, quantize_qkv
from smelt.kvcache.selection.config import SparseAttentionConfig
from smelt.kvcache.selection.page_store import GatheredPages, PageStore
from smelt.kvcache.selection.page_summary import PageSummaryTable
from smelt.kvcache.selection.trace import TraceRecorder


@dataclass(frozen=True)
class PrefillChunk:
    """New tokens of one prompt, contiguous in the batch."""

    token_slice: slice
    seq_len: int  # including earlier tokens
    block_ids: Tensor  # [blocks] that hold the sequence, in order


@dataclass(frozen=True)
class DecodeBatch:
    """Requests with one new token each."""

    token_indices: Tensor  # [requests]: positions in the batch
    seq_lens: Tensor  # [requests], the new token included
    block_tables: Tensor  # [requests, max_blocks]
    request_ids: Sequence[str]

    def split(self, num_pages: Sequence[int], max_pages: int) -> Iterator[DecodeBatch]:
        """Split in order into batches of at most `max_pages` pages per head, from the pages each request needs."""
        start, total = 0, 0
        for row, count in enumerate(num_pages):
            if total + count > max_pages and total:
                yield self._rows(start, row)
                start, total = row, 0
            total += count
        yield self._rows(start, len(num_pages))

    def _rows(self, start: int, stop: int) -> DecodeBatch:
        rows = slice(start, stop)
        return DecodeBatch(
            self.token_indices[rows], self.seq_lens[rows], self.block_tables[rows], self.request_ids[rows]
        )


@dataclass(frozen=True)
class SparseBatch:
    """Tokens of one step. Tensors are int64; those of `decodes` are on the device, the others on the host."""

    step: int  # counted from 1
    slot_mapping: Tensor  # [tokens]: block * page_size + offset
    filled_blocks: Tensor  # blocks whose last token is in this batch
    prefills: Sequence[PrefillChunk] = ()
    decodes: Sequence[DecodeBatch] = ()


@dataclass
class SparsePageAttention:
    """Attention over one KV cache. Call `attend` for every layer of a step, in order."""

    config: SparseAttentionConfig
    page_store: PageStore
    summaries: PageSummaryTable
    recorder: TraceRecorder | None = None
    kv_formats: Mapping[int, KVQuantFormat | None] = field(default_factory=dict)  # layer -> quantized KV format

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, batch: SparseBatch, scale: float
    ) -> Tensor:  # [tokens, heads, head_dim] -> same shape
        """Write keys and values [tokens, kv_heads, head_dim] to their pages, then attend."""
        kv_format = self.kv_formats.get(layer)
        queries, new_keys, new_values = quantize_qkv(kv_format, queries, keys, values)
        self.page_store.write(layer, new_keys, new_values, batch.slot_mapping)
        if len(batch.filled_blocks):
            stored = self.page_store.gather_keys(layer, batch.filled_blocks)
            full_keys = stored if kv_format is None else kv_format.dequantize(stored, queries.dtype)
            self.summaries.update(layer, batch.filled_blocks, full_keys)
        grouped = queries.unflatten(1, (keys.shape[1], -1))  # [tokens, kv_heads, group, head_dim]
        output = torch.empty_like(grouped)
        for chunk in batch.prefills:
            pages = self.page_store.gather_all(layer, chunk.block_ids)
            output[chunk.token_slice] = _prefill_attention(
                grouped[chunk.token_slice], pages, chunk.seq_len, scale, kv_format
            )
        for decode in batch.decodes:
            output[decode.token_indices] = self._decode_attention(
                layer, grouped[decode.token_indices], decode, batch.step, scale
            )
        return output.flatten(1, 2)

    def _decode_attention(self, layer: int, queries: Tensor, batch: DecodeBatch, step: int, scale: float) -> Tensor:
        scores = self.summaries.scores(layer, queries, batch.block_tables)  # [requests, kv_heads, pages]
        selected = self.config.select_pages(scores, batch.seq_lens)  # [requests, kv_heads, max_selected]
        num_selected = self.config.num_selected_pages(batch.seq_lens)  # [requests]
        rank = torch.arange(selected.shape[-1], device=selected.device)
        mask = (rank < num_selected[:, None, None]).expand_as(selected)
        block_ids = batch.block_tables[:, None].expand(-1, selected.shape[1], -1).gather(2, selected)
        pages = self.page_store.gather_selected(layer, block_ids, mask, step)
        if self.recorder is not None:
            self.recorder.add(step, layer, batch.request_ids, selected.cpu(), mask.cpu(), pages.recalled)
        page_size = self.config.page_size
        last_page_tokens = batch.seq_lens - (self.config.num_pages(batch.seq_lens) - 1) * page_size
        selected_lens = (num_selected - 1) * page_size + last_page_tokens
        return _selected_attention(queries, pages, selected_lens, scale, self.kv_formats.get(layer))


def _prefill_attention(
    queries: Tensor, pages: GatheredPages, seq_len: int, scale: float, kv_format: KVQuantFormat | None
) -> Tensor:
    """Attend from new tokens of one request [tokens, kv_heads, group, head_dim]; each KV head is a sequence."""
    new, kv_heads = queries.shape[:2]
    flat = queries.transpose(0, 1).flatten(0, 1)  # [kv_heads * tokens, group, head_dim]
    seq_lens = torch.full((kv_heads,), seq_len)
    output = _paged_attention(flat, pages, [new] * kv_heads, seq_lens, seq_len, scale, kv_format)
    return output.unflatten(0, (kv_heads, new)).transpose(0, 1)


def _selected_attention(
    queries: Tensor, pages: GatheredPages, selected_lens: Tensor, scale: float, kv_format: KVQuantFormat | None
) -> Tensor:
    """Attend from one new token per request [requests, kv_heads, group, head_dim]; each KV head is a sequence of
    `selected_lens` [requests] tokens."""
    requests, kv_heads = queries.shape[:2]
    seq_lens = selected_lens.repeat_interleave(kv_heads)
    max_seq_len = pages.block_tables.shape[-1] * pages.keys.shape[1]
    query_lens = [1] * (requests * kv_heads)
    output = _paged_attention(queries.flatten(0, 1), pages, query_lens, seq_lens, max_seq_len, scale, kv_format)
    return output.unflatten(0, (requests, kv_heads))


def _paged_attention(
    queries: Tensor,
    pages: GatheredPages,
    query_lens: list[int],
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    kv_format: KVQuantFormat | None,
) -> Tensor:  # [tokens, group, head_dim] -> same shape
    """Call paged attention on a KV cache with one head."""
    device = queries.device
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    metadata = AttentionMetadata(
        cu_seqlens_q=starts.int().to(device),
        seq_lens=seq_lens.int().to(device),
        block_tables=pages.block_tables.flatten(0, -2).int().contiguous(),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        max_seq_len=max_seq_len,
        query_lens=query_lens,
    )
    return paged.paged_attention(queries.contiguous(), pages.keys, pages.values, metadata, scale, kv_quant=kv_format)
