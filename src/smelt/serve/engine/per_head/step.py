"""Attention metadata of a per-head step: its tokens, their cache rows, and the chunks compressed afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smelt.kvcache.eviction.policy import EvictionStep
from smelt.serve.engine.per_head.cache import PerHeadCache
from smelt.serve.engine.per_head.cache_manager import PerHeadCacheState, per_head_state, places_between
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

Send = Callable[[np.ndarray[Any, Any]], Tensor]  # to the device


@dataclass(frozen=True)
class Chunk:
    """A prompt chunk that is compressed in each layer after its attention."""

    first: int  # row of its first token in the step
    count: int
    end: int  # tokens of the text up to its end
    judged: EvictionStep
    chosen: Tensor  # [layers, kv_heads], int64: retained tokens of the region
    here: Tensor  # [layers, kv_heads, region], int64: cache rows of the region
    there: Tensor  # [layers, kv_heads, max retained], int64: target rows; see `chunk_of`


@dataclass(frozen=True)
class PerHeadBatch:
    """Tokens of all scheduled chunks, concatenated."""

    cache: PerHeadCache
    slots: Tensor  # [tokens], int64: slot of the request
    positions: Tensor  # [tokens], int64: in the text
    piece_slots: Tensor  # [pieces], int64
    bounds: Tensor  # [pieces + 1], int32: first rows of the chunks
    lengths: Tensor  # [pieces], int32: tokens of the text, including the new ones
    counts: list[int]
    longest: int  # max cached tokens of any cluster of any chunk
    chunks: list[Chunk]


class Tables:
    """Host-side state of the block tables: what was written per slot, and the staging pages of a step."""

    def __init__(self, cache: PerHeadCache, slots: int, send: Send) -> None:
        self.cache, self._send = cache, send
        self._written: list[tuple[list[int], int]] = [([], 0)] * slots  # per slot: blocks, and how many are written

    def before(self, step: ScheduledBatch) -> None:
        if step.copies:
            sources, targets = self._send(np.array(step.copies, dtype=np.int64).T)
            self.cache.copy(sources, targets)
        self._write(step.pieces)
        self._shift(step.pieces, after=False)

    def after(self, step: ScheduledBatch) -> None:
        self._shift(step.pieces, after=True)

    def _write(self, pieces: list[ScheduledChunk]) -> None:
        """Write pages allocated since the last step, and staging pages of prompt chunks, in one copy."""
        entries: list[int] = []
        pages: list[int] = []
        num_staged = 0
        stride = self.cache.tables[0].numel()
        for scheduled in pieces:
            request, state = scheduled.request, per_head_state(scheduled.request)
            written, count = self._written[request.slot]
            if written is not request.blocks:
                count = 0
            new_entries = [request.slot * stride + entry for entry in state.places[count:]]
            entries += new_entries
            pages += request.blocks[count:]
            self._written[request.slot] = (request.blocks, len(request.blocks))
            if scheduled.start < state.kept.stop:
                staged = self._staged(scheduled, state)
                entries += [request.slot * stride + entry for entry in staged]
                pages += self.cache.staging[num_staged : num_staged + len(staged)]
                num_staged += len(staged)
        if entries:
            update = self._send(np.array([entries, pages], dtype=np.int64))
            self.cache.tables.view(-1)[update[0]] = update[1].int()

    def _shift(self, pieces: list[ScheduledChunk], *, after: bool) -> None:
        """Update how far clusters lag behind the text, before or after a chunk is computed."""
        chunks = [scheduled for scheduled in pieces if scheduled.start < per_head_state(scheduled.request).kept.stop]
        changed = (
            chunks
            if after
            else [scheduled for scheduled in pieces if scheduled.start == per_head_state(scheduled.request).kept.start]
        )
        if not changed:
            return
        ends = [scheduled.start + (scheduled.count if after else 0) for scheduled in changed]
        shifts = np.stack(
            [
                per_head_state(scheduled.request).kept.lengths(end) - end
                for scheduled, end in zip(changed, ends, strict=True)
            ]
        )
        slots = self._send(np.array([scheduled.request.slot for scheduled in changed], dtype=np.int64))
        self.cache.shifts[slots] = self._send(shifts).int()

    def _staged(self, piece: ScheduledChunk, state: PerHeadCacheState) -> list[int]:
        """Return the table entries beyond a request's own pages that a chunk needs until it is compressed."""
        lengths = state.kept.lengths(piece.start) + piece.count
        return places_between(state.pages, -(-lengths // self.cache.size), self.cache.tables.shape[2])


def step_of(cache: PerHeadCache, pieces: list[ScheduledChunk], tokens: Tensor, send: Send) -> PerHeadBatch:
    """Build the metadata of a step; `tokens` are slots and positions [2, tokens] on the device."""
    counts = [scheduled.count for scheduled in pieces]
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lengths = np.array([scheduled.start + scheduled.count for scheduled in pieces], dtype=np.int32)
    max_seq_len = max(
        int(per_head_state(scheduled.request).kept.lengths(scheduled.start).max()) + scheduled.count
        for scheduled in pieces
    )
    chunks = []
    for first, scheduled in zip(bounds.tolist(), pieces, strict=False):
        stop = scheduled.start + scheduled.count
        kept = per_head_state(scheduled.request).kept
        eviction = kept.eviction_step(scheduled.start, stop) if scheduled.start < kept.stop else None
        if eviction is not None:
            chunks.append(chunk_of(cache, scheduled, first, eviction, send))
    return PerHeadBatch(
        cache, tokens[0], tokens[1], send(np.array([scheduled.request.slot for scheduled in pieces], dtype=np.int64)),
        send(bounds), send(lengths), counts, max_seq_len, chunks,
    )  # fmt: skip


def chunk_of(cache: PerHeadCache, piece: ScheduledChunk, first: int, judged: EvictionStep, send: Send) -> Chunk:
    """Compute all that does not depend on scores, for all layers at once. A head's best tokens go after its locked
    ones, best first, then the window; evicted tokens go after that, where nothing reads them."""
    locked, retained = (counts[cache.cluster] for counts in send(np.stack([judged.locked, judged.retained])))
    max_retained = int(judged.retained.max())
    order = torch.arange(max_retained - judged.window, device=locked.device).expand(*locked.shape, -1)
    window = torch.arange(judged.window, device=locked.device).expand(*locked.shape, -1)
    num_best = retained[..., None] - judged.window
    target_offsets = torch.cat((torch.where(order < num_best, order, order + judged.window), num_best + window), dim=-1)
    offsets = torch.arange(judged.region, device=locked.device)

    def rows(places: Tensor) -> Tensor:
        heads, columns = (index[..., None].expand_as(places) for index in (cache.cluster, cache.column))
        return cache.rows(torch.full_like(places, piece.request.slot), heads, columns, locked[..., None] + places)

    return Chunk(
        first, piece.count, piece.start + piece.count, judged, retained, rows(offsets.expand(*locked.shape, -1)),
        rows(target_offsets),
    )  # fmt: skip
