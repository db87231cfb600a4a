"""Attention over pages of clusters by the ordinary paged one: every head of a request is a sequence of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from smelt.errors import ModelError
from smelt.kernels.paged import Pages, paged_attention
from smelt.serve.engine.ragged.compress import Judge
from smelt.serve.engine.ragged.step import RaggedStep

NAME = "smelt-ragged"
_moment = local()


def write(step: RaggedStep, layer: int, keys: Tensor, values: Tensor) -> None:
    """Keys and values [tokens, kv_heads, width] of new tokens, behind what each head holds."""
    cache = step.cache
    heads = cache.cluster[layer]
    places = step.positions[:, None] + cache.shifts[step.slots][:, heads]  # [tokens, kv_heads]
    rows = cache.rows(
        step.slots[:, None].expand_as(places), heads.expand_as(places), cache.column[layer].expand_as(places), places
    ).flatten()
    cache.keys.view(-1, keys.shape[-1]).index_copy_(0, rows, keys.flatten(0, 1))
    cache.values.view(-1, keys.shape[-1]).index_copy_(0, rows, values.flatten(0, 1))


def attend(step: RaggedStep, layer: int, queries: Tensor, scale: float) -> Tensor:  # [tokens, heads, width] -> the same
    cache, tokens = step.cache, len(queries)
    heads, columns = cache.cluster[layer], cache.column[layer]
    most = -(-step.longest // cache.size)
    tables = cache.tables[step.piece_slots][:, heads, :most] * cache.columns + columns[:, None].int()
    lengths = step.lengths[:, None] + cache.shifts[step.piece_slots][:, heads]  # [pieces, kv_heads]
    begins = torch.arange(len(heads), device=queries.device, dtype=torch.int32)[:, None] * tokens + step.bounds[:-1]
    pages = Pages(
        starts=torch.cat((begins.flatten(), step.bounds[-1:] * len(heads))),
        lengths=lengths.T.flatten().int(),
        tables=tables.transpose(0, 1).flatten(0, 1).int().contiguous(),
        places=step.positions,
        longest=step.longest,
        counts=step.counts * len(heads),
    )
    grouped = queries.unflatten(1, (len(heads), -1))  # [tokens, kv_heads, group, width]
    found = paged_attention(grouped.transpose(0, 1).flatten(0, 1), cache.keys, cache.values, pages, scale)
    return found.unflatten(0, (len(heads), tokens)).transpose(0, 1).flatten(1, 2)


@contextmanager
def ragged(step: RaggedStep, judge: Judge) -> Iterator[None]:
    """Inside, the network's attention reads and writes pages of clusters, and chunks are compressed."""
    _moment.step, _moment.judge = step, judge
    try:
        yield
    finally:
        del _moment.step, _moment.judge


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers calls it: [1, heads, tokens, width] each; gives [1, tokens, heads, width]."""
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise ModelError("this family's attention has caps or sinks, which the paged cache does not know.")
    step, layer = _moment.step, int(module.layer_idx)  # type: ignore[arg-type]
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    queries = query[0].transpose(0, 1)
    write(step, layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    found = attend(step, layer, queries, scale)
    _moment.judge(step, layer, queries, scale)
    return found[None], None


AttentionInterface.register(NAME, _attention)
