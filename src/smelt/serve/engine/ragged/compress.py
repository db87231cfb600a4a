"""After a layer has read a chunk: each head keeps its best tokens of it, moved together in the request's own pages."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.kv.seen import Seen, Turn
from smelt.serve.engine.ragged.step import Chunk, RaggedStep


class Judge:
    """`turn` and `back` are the rotation of a network's queries by their positions, and its inverse."""

    def __init__(self, turn: Turn, back: Turn) -> None:
        self.turn, self.back = turn, back

    def __call__(self, step: RaggedStep, layer: int, queries: Tensor, scale: float) -> None:
        """Queries are those of the whole step, [tokens, heads, width], turned."""
        for chunk in step.chunks:
            self._compress(step, layer, chunk, queries[chunk.first : chunk.first + chunk.count], scale)

    def _compress(self, step: RaggedStep, layer: int, chunk: Chunk, queries: Tensor, scale: float) -> None:
        cache, judged = step.cache, chunk.judged
        heads, columns = cache.cluster[layer], cache.column[layer]
        counts = judged.chosen[cache.clusters.cluster[layer].numpy()]
        if counts.min() == judged.region:
            return
        locked, chosen = chunk.locked[heads], chunk.chosen[heads]  # [kv_heads]
        every = torch.arange(judged.region, device=locked.device)

        def rows(places: Tensor) -> Tensor:  # [kv_heads, count] -> the same
            return cache.rows(
                torch.full_like(places, chunk.slot),
                heads[:, None].expand_as(places),
                columns[:, None].expand_as(places),
                places,
            )

        here = rows(locked[:, None] + every)
        width = cache.keys.shape[-1]
        keys, values = (
            pages.view(-1, width)[here] for pages in (cache.keys, cache.values)
        )  # [kv_heads, region, width]
        first = chunk.end - judged.region
        own = self.back(queries.transpose(0, 1)[None], chunk.end - chunk.count)
        seen = Seen(keys[None], values[None], own, lambda x, at: self.turn(x, first + at), scale)
        scores = judged.scorer.scores(seen)[0]
        source, target, there = _moves(scores, chosen, int(counts.max()), judged.window)  # [kv_heads, most]
        to = torch.where(there, rows(locked[:, None] + torch.where(there, target, 0)), cache.nowhere).flatten()
        for pages, old in ((cache.keys, keys), (cache.values, values)):
            moved = old.gather(1, source[..., None].expand(-1, -1, width))
            pages.view(-1, width).index_copy_(0, to, moved.flatten(0, 1))


def _moves(scores: Tensor, chosen: Tensor, most: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """From scores [kv_heads, region] and how many tokens each head keeps, at most `most`: which tokens go where, and
    which of these pairs mean anything. The window comes last, so that the next chunk finds it."""
    region = scores.shape[1]
    best = scores[:, : region - window].argsort(dim=1, descending=True, stable=True)[:, : most - window]
    rank = torch.arange(best.shape[1], device=scores.device).expand_as(best)
    last = torch.arange(window, device=scores.device).expand(len(scores), window)
    source = torch.cat((best, region - window + last), dim=1)
    target = torch.cat((rank, chosen[:, None] - window + last), dim=1)
    there = torch.cat((rank < chosen[:, None] - window, torch.ones_like(last, dtype=torch.bool)), dim=1)
    return source, target, there
