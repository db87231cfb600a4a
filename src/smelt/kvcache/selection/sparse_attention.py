"""A layer's attention in a step with page selection: prompts attend to all of their pages, answers to chosen ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smelt.kernels import paged
from smelt.kernels.kv_quant import RowFormat, packed
from smelt.kvcache.selection.config import SparseAttentionConfig
from smelt.kvcache.selection.page_store import GatheredPages, Pages
from smelt.kvcache.selection.page_summary import PageSummaryTable
from smelt.kvcache.selection.trace import TraceRecorder


@dataclass(frozen=True)
class PrefillChunk:
    """New tokens of a prompt, which stand behind one another in the step."""

    tokens: slice
    length: int  # with those before them
    blocks: Tensor  # that hold them all, in order


@dataclass(frozen=True)
class DecodeBatch:
    """Requests with one new token each."""

    tokens: Tensor  # [requests]: where these stand in the step
    lengths: Tensor  # [requests], the new one included
    tables: Tensor  # [requests, most blocks]
    names: Sequence[str]

    def split(self, counts: Sequence[int], most: int) -> Iterator[DecodeBatch]:
        """In order, as many at once as have no more than `most` pages of a head together."""
        start, together = 0, 0
        for row, count in enumerate(counts):
            if together + count > most and together:
                yield self._part(start, row)
                start, together = row, 0
            together += count
        yield self._part(start, len(counts))

    def _part(self, start: int, stop: int) -> DecodeBatch:
        here = slice(start, stop)
        return DecodeBatch(self.tokens[here], self.lengths[here], self.tables[here], self.names[here])


@dataclass(frozen=True)
class SparseBatch:
    """Whose tokens a step has. All tensors are int64; those of `asking` are on the device, the others on the host."""

    step: int  # counted from 1
    places: Tensor  # [tokens]: block * size + offset
    filled: Tensor  # blocks whose last token is among them
    reading: Sequence[PrefillChunk] = ()
    asking: Sequence[DecodeBatch] = ()


@dataclass
class SparsePageAttention:
    """Of one cache. `attend` is called for every layer of a step, in order."""

    selection: SparseAttentionConfig
    pages: Pages
    digested: PageSummaryTable
    recorder: TraceRecorder | None = None
    rows: Mapping[int, RowFormat | None] = field(default_factory=dict)  # of layers whose pages hold bytes

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, layout: SparseBatch, scale: float
    ) -> Tensor:  # [tokens, heads, width] -> the same
        """Keys and values are [tokens, kv_heads, width], and are written to their pages first."""
        rows = self.rows.get(layer)
        queries, new_keys, new_values = packed(rows, queries, keys, values)
        self.pages.write(layer, new_keys, new_values, layout.places)
        if len(layout.filled):
            full = self.pages.keys_of(layer, layout.filled)
            self.digested.update(layer, layout.filled, full if rows is None else rows.decode(full, queries.dtype))
        grouped = queries.unflatten(1, (keys.shape[1], -1))  # [tokens, kv_heads, group, width]
        result = torch.empty_like(grouped)
        for part in layout.reading:
            found = self.pages.whole(layer, part.blocks)
            result[part.tokens] = _over_whole(grouped[part.tokens], found, part.length, scale, rows)
        for asking in layout.asking:
            result[asking.tokens] = self._over_chosen(layer, grouped[asking.tokens], asking, layout.step, scale)
        return result.flatten(1, 2)

    def _over_chosen(self, layer: int, queries: Tensor, asking: DecodeBatch, step: int, scale: float) -> Tensor:
        scores = self.digested.scores(layer, queries, asking.tables)  # [requests, kv_heads, pages]
        chosen = self.selection.choose(scores, asking.lengths)  # [requests, kv_heads, most]
        counts = self.selection.counts(asking.lengths)  # [requests]
        there = (torch.arange(chosen.shape[-1], device=chosen.device) < counts[:, None, None]).expand_as(chosen)
        blocks = asking.tables[:, None].expand(-1, chosen.shape[1], -1).gather(2, chosen)
        found = self.pages.chosen(layer, blocks, there, step)
        if self.recorder is not None:
            self.recorder.add(step, layer, asking.names, chosen.cpu(), there.cpu(), found.recalled)
        last = asking.lengths - (self.selection.held(asking.lengths) - 1) * self.selection.page  # tokens of the last
        seen = (counts - 1) * self.selection.page + last
        return _over_sequences(queries, found, seen, scale, self.rows.get(layer))


def _over_whole(queries: Tensor, found: GatheredPages, length: int, scale: float, rows: RowFormat | None) -> Tensor:
    """New tokens of one request [tokens, kv_heads, group, width], each head of keys a sequence."""
    new, kv_heads = queries.shape[:2]
    flat = queries.transpose(0, 1).flatten(0, 1)  # [kv_heads * tokens, group, width]
    result = _attention(flat, found, [new] * kv_heads, torch.full((kv_heads,), length), length, scale, rows)
    return result.unflatten(0, (kv_heads, new)).transpose(0, 1)


def _over_sequences(
    queries: Tensor, found: GatheredPages, seen: Tensor, scale: float, rows: RowFormat | None
) -> Tensor:
    """One new token a request, [requests, kv_heads, group, width]; each head sees so many tokens of its own choice."""
    requests, kv_heads = queries.shape[:2]
    lengths = seen.repeat_interleave(kv_heads)
    longest = found.rows.shape[-1] * found.keys.shape[1]
    result = _attention(queries.flatten(0, 1), found, [1] * (requests * kv_heads), lengths, longest, scale, rows)
    return result.unflatten(0, (requests, kv_heads))


def _attention(
    queries: Tensor,
    found: GatheredPages,
    counts: list[int],
    lengths: Tensor,
    longest: int,
    scale: float,
    rows: RowFormat | None,
) -> Tensor:  # [tokens, group, width] -> the same
    """Over a cache with one head of keys."""
    device = queries.device
    starts = torch.tensor([0, *counts]).cumsum(0)
    pages = paged.Pages(
        starts=starts.int().to(device),
        lengths=lengths.int().to(device),
        tables=found.rows.flatten(0, -2).int().contiguous(),
        places=torch.empty(0, dtype=torch.int64, device=device),
        longest=longest,
        counts=counts,
    )
    return paged.paged_attention(queries.contiguous(), found.keys, found.values, pages, scale, rows=rows)
