"""After a layer has read a chunk: each head keeps its best tokens of it, moved together in the request's own pages."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.kvcache.eviction.scorer import AttentionInputs
from smelt.kvcache.rope import RotateFn
from smelt.serve.engine.per_head.cache import PerHeadCache
from smelt.serve.engine.per_head.step import Chunk, PerHeadBatch


class Judge:
    """`turn` and `back` are the rotation of a network's queries by their positions, and its inverse."""

    def __init__(self, turn: RotateFn, back: RotateFn) -> None:
        self.turn, self.back = turn, back

    def __call__(self, step: PerHeadBatch, layer: int, queries: Tensor, scale: float) -> None:
        """Queries are those of the whole step, [tokens, heads, width], turned."""
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
