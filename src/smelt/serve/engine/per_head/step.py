"""What a step's attention needs to know: whose tokens are computed, where they go, and what is decided afterwards."""

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
    """A chunk of a prompt whose tokens are judged when a layer's attention is done with them."""

    first: int  # of its tokens in the step
    count: int
    end: int  # tokens of the text that are read then
    judged: EvictionStep
    chosen: Tensor  # [layers, kv_heads], int64: how many each head keeps of the region
    here: Tensor  # [layers, kv_heads, region], int64: rows of the cache in which they lie
    there: Tensor  # [layers, kv_heads, most], int64: rows to which the chosen ones go; see `chunk_of`


@dataclass(frozen=True)
class PerHeadBatch:
    """Tokens of all pieces behind one another."""

    cache: PerHeadCache
    slots: Tensor  # [tokens], int64: whose
    positions: Tensor  # [tokens], int64: in the text
    piece_slots: Tensor  # [pieces], int64
    bounds: Tensor  # [pieces + 1], int32: where pieces begin
    lengths: Tensor  # [pieces], int32: tokens of the text with the new ones
    counts: list[int]
    longest: int  # tokens that any cluster of any piece holds, at most
    chunks: list[Chunk]


class Tables:
    """The host's side of the tables: what was written of each slot, and the staging area of a step."""

    def __init__(self, cache: PerHeadCache, slots: int, send: Send) -> None:
        self.cache, self._send = cache, send
        self._written: list[tuple[list[int], int]] = [([], 0)] * slots  # blocks of a slot, and how many of them

    def before(self, step: ScheduledBatch) -> None:
        if step.copies:
            sources, targets = self._send(np.array(step.copies, dtype=np.int64).T)
            self.cache.copy(sources, targets)
        self._write(step.pieces)
        self._shift(step.pieces, after=False)

    def after(self, step: ScheduledBatch) -> None:
        self._shift(step.pieces, after=True)

    def _write(self, pieces: list[ScheduledChunk]) -> None:
        """Pages that requests were given since their last step, and pages that a chunk borrows, in one copy."""
        places: list[int] = []
        pages: list[int] = []
        borrowed = 0
        stride = self.cache.tables[0].numel()
        for piece in pieces:
            request, state = piece.request, per_head_state(piece.request)
            held, count = self._written[request.slot]
            if held is not request.blocks:
                count = 0
            new = [request.slot * stride + place for place in state.places[count:]]
            places += new
            pages += request.blocks[count:]
            self._written[request.slot] = (request.blocks, len(request.blocks))
            if piece.start < state.kept.stop:
                lent = self._staged(piece, state)
                places += [request.slot * stride + place for place in lent]
                pages += self.cache.staging[borrowed : borrowed + len(lent)]
                borrowed += len(lent)
        if places:
            both = self._send(np.array([places, pages], dtype=np.int64))
            self.cache.tables.view(-1)[both[0]] = both[1].int()

    def _shift(self, pieces: list[ScheduledChunk], *, after: bool) -> None:
        """How far clusters lag behind the text: before a chunk is read, or after."""
        chunks = [piece for piece in pieces if piece.start < per_head_state(piece.request).kept.stop]
        fresh = (
            chunks if after else [piece for piece in pieces if piece.start == per_head_state(piece.request).kept.start]
        )
        if not fresh:
            return
        ends = [piece.start + (piece.count if after else 0) for piece in fresh]
        shifts = np.stack(
            [per_head_state(piece.request).kept.lengths(end) - end for piece, end in zip(fresh, ends, strict=True)]
        )
        slots = self._send(np.array([piece.request.slot for piece in fresh], dtype=np.int64))
        self.cache.shifts[slots] = self._send(shifts).int()

    def _staged(self, piece: ScheduledChunk, state: PerHeadCacheState) -> list[int]:
        """Places behind a request's own pages that the chunk needs until it is judged."""
        raw = state.kept.lengths(piece.start) + piece.count
        return places_between(state.pages, -(-raw // self.cache.size), self.cache.tables.shape[2])


def step_of(cache: PerHeadCache, pieces: list[ScheduledChunk], tokens: Tensor, send: Send) -> PerHeadBatch:
    """`tokens` are slots and positions of all tokens, [2, tokens], on the device."""
    counts = [piece.count for piece in pieces]
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lengths = np.array([piece.start + piece.count for piece in pieces], dtype=np.int32)
    longest = max(int(per_head_state(piece.request).kept.lengths(piece.start).max()) + piece.count for piece in pieces)
    chunks = []
    for first, piece in zip(bounds.tolist(), pieces, strict=False):
        stop = piece.start + piece.count
        kept = per_head_state(piece.request).kept
        judged = kept.eviction_step(piece.start, stop) if piece.start < kept.stop else None
        if judged is not None:
            chunks.append(chunk_of(cache, piece, first, judged, send))
    return PerHeadBatch(
        cache, tokens[0], tokens[1], send(np.array([piece.request.slot for piece in pieces], dtype=np.int64)),
        send(bounds), send(lengths), counts, longest, chunks,
    )  # fmt: skip


def chunk_of(cache: PerHeadCache, piece: ScheduledChunk, first: int, judged: EvictionStep, send: Send) -> Chunk:
    """All that does not depend on scores, for all layers at once. A head's best tokens go behind what is locked, the
    best first, then the window; what it does not keep goes behind that, where nobody looks for it."""
    locked, chosen = (counts[cache.cluster] for counts in send(np.stack([judged.locked, judged.retained])))
    most = int(judged.retained.max())
    rank = torch.arange(most - judged.window, device=locked.device).expand(*locked.shape, -1)
    last = torch.arange(judged.window, device=locked.device).expand(*locked.shape, -1)
    ahead = chosen[..., None] - judged.window
    targets = torch.cat((torch.where(rank < ahead, rank, rank + judged.window), ahead + last), dim=-1)
    every = torch.arange(judged.region, device=locked.device)

    def rows(places: Tensor) -> Tensor:
        heads, columns = (each[..., None].expand_as(places) for each in (cache.cluster, cache.column))
        return cache.rows(torch.full_like(places, piece.request.slot), heads, columns, locked[..., None] + places)

    return Chunk(
        first, piece.count, piece.start + piece.count, judged, chosen, rows(every.expand(*locked.shape, -1)),
        rows(targets),
    )  # fmt: skip
