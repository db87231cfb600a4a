"""Attention metadata of a per-head step: its tokens, their cache rows, and the chunks compressed afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smelt.kvcache.eviction.policy import EvictionStep
from smelt.serve.engine.block_table import BlockTables, ToDevice
from smelt.serve.engine.per_head.cache import PerHeadCache
from smelt.serve.engine.per_head.cache_manager import PerHeadCacheState, missing_entries, per_head_state
from smelt.serve.engine.runner import cumulative_lens
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk


@dataclass(frozen=True)
class EvictionChunk:
    """A prompt chunk that is compressed in each layer after its attention."""

    first_row: int  # row of its first token in the step
    count: int
    end: int  # tokens of the text up to its end
    eviction: EvictionStep
    source_rows: Tensor  # [layers, kv_heads, region], int64: cache rows of the region
    target_rows: Tensor  # [layers, kv_heads, max retained], int64: see `build_eviction_chunk`


@dataclass(frozen=True)
class PerHeadBatch:
    """Tokens of all scheduled chunks, concatenated."""

    cache: PerHeadCache
    slots: Tensor  # [tokens], int64: slot of the request
    positions: Tensor  # [tokens], int64: in the text
    request_slots: Tensor  # [chunks], int64
    cu_seqlens_q: Tensor  # [chunks + 1], int32: first rows of the chunks
    seq_lens: Tensor  # [chunks], int32: tokens of the text, including the new ones
    query_lens: list[int]
    max_seq_len: int  # cached tokens of any cluster of any chunk, at most
    eviction_chunks: list[EvictionChunk]


class PerHeadTables:
    """Keep the block tables and length offsets of a per-head cache up to date, step by step."""

    def __init__(self, cache: PerHeadCache, to_device: ToDevice) -> None:
        self.cache, self._to_device = cache, to_device
        self._block_tables = BlockTables(cache.block_tables, to_device)

    def prepare(self, batch: ScheduledBatch) -> None:
        if batch.copies:
            sources, targets = self._to_device(np.array(batch.copies, dtype=np.int64).T)
            self.cache.copy(sources, targets)
        self._write_block_tables(batch.chunks)
        started = [chunk for chunk in batch.chunks if chunk.start == per_head_state(chunk.request).retention.start]
        self._write_seq_len_offsets(started, [chunk.start for chunk in started])

    def finish(self, batch: ScheduledBatch) -> None:
        prefilled = [chunk for chunk in batch.chunks if _is_prefill(chunk)]
        self._write_seq_len_offsets(prefilled, [chunk.start + chunk.count for chunk in prefilled])

    def _write_block_tables(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Write pages allocated since the last step, and staging pages of prompt chunks, in one copy."""
        num_staged = 0
        for chunk in chunks:
            request, state = chunk.request, per_head_state(chunk.request)
            self._block_tables.stage_new_blocks(request, state.entries)
            if _is_prefill(chunk):
                entries = self._staging_entries(chunk, state)
                pages = self.cache.staging[num_staged : num_staged + len(entries)]
                self._block_tables.stage(request.slot, entries, pages)
                num_staged += len(entries)
        self._block_tables.commit()

    def _write_seq_len_offsets(self, chunks: Sequence[ScheduledChunk], ends: Sequence[int]) -> None:
        """Write how far clusters lag behind the text once `ends` tokens of each request are computed."""
        if not chunks:
            return
        offsets = np.stack(
            [
                per_head_state(chunk.request).retention.lengths(end) - end
                for chunk, end in zip(chunks, ends, strict=True)
            ]
        )
        slots = self._to_device(np.array([chunk.request.slot for chunk in chunks], dtype=np.int64))
        self.cache.seq_len_offsets[slots] = self._to_device(offsets).int()

    def _staging_entries(self, chunk: ScheduledChunk, state: PerHeadCacheState) -> list[int]:
        """Return the table entries beyond a request's own pages that a chunk needs until it is compressed."""
        lengths = state.retention.lengths(chunk.start) + chunk.count
        return missing_entries(state.pages, -(-lengths // self.cache.block_size), self.cache.block_tables.shape[2])


def _is_prefill(chunk: ScheduledChunk) -> bool:
    return chunk.start < per_head_state(chunk.request).retention.stop


def build_batch(
    cache: PerHeadCache, chunks: Sequence[ScheduledChunk], tokens: Tensor, to_device: ToDevice
) -> PerHeadBatch:
    """Build the metadata of a step; `tokens` are slots and positions [2, tokens] on the device."""
    query_lens = [chunk.count for chunk in chunks]
    cu_seqlens_q = cumulative_lens(query_lens)
    seq_lens = np.array([chunk.start + chunk.count for chunk in chunks], dtype=np.int32)
    max_seq_len = max(
        int(per_head_state(chunk.request).retention.lengths(chunk.start).max()) + chunk.count for chunk in chunks
    )
    eviction_chunks = []
    for first_row, chunk in zip(cu_seqlens_q.tolist(), chunks, strict=False):
        retention = per_head_state(chunk.request).retention
        eviction = retention.eviction_step(chunk.start, chunk.start + chunk.count) if _is_prefill(chunk) else None
        if eviction is not None:
            eviction_chunks.append(build_eviction_chunk(cache, chunk, first_row, eviction, to_device))
    request_slots = to_device(np.array([chunk.request.slot for chunk in chunks], dtype=np.int64))
    return PerHeadBatch(
        cache, tokens[0], tokens[1], request_slots, to_device(cu_seqlens_q), to_device(seq_lens), query_lens,
        max_seq_len, eviction_chunks,
    )  # fmt: skip


def build_eviction_chunk(
    cache: PerHeadCache, chunk: ScheduledChunk, first_row: int, eviction: EvictionStep, to_device: ToDevice
) -> EvictionChunk:
    """Compute all that does not depend on scores, for all layers at once. A head's best tokens go after its locked
    ones, best first, then the window; evicted tokens go after that, where nothing reads them."""
    locked, retained = (counts[cache.cluster] for counts in to_device(np.stack([eviction.locked, eviction.retained])))
    max_retained = int(eviction.retained.max())
    order = torch.arange(max_retained - eviction.window, device=locked.device).expand(*locked.shape, -1)
    window = torch.arange(eviction.window, device=locked.device).expand(*locked.shape, -1)
    num_best = retained[..., None] - eviction.window
    target_offsets = torch.cat(
        (torch.where(order < num_best, order, order + eviction.window), num_best + window), dim=-1
    )
    source_offsets = torch.arange(eviction.region, device=locked.device).expand(*locked.shape, -1)

    def rows(offsets: Tensor) -> Tensor:
        clusters, columns = (index[..., None].expand_as(offsets) for index in (cache.cluster, cache.column))
        slots = torch.full_like(offsets, chunk.request.slot)
        return cache.rows(slots, clusters, columns, locked[..., None] + offsets)

    return EvictionChunk(
        first_row, chunk.count, chunk.start + chunk.count, eviction, rows(source_offsets), rows(target_offsets)
    )
