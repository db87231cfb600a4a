"""Attention over a paged cache: queries of many requests side by side, each against its own keys and values.

Tokens of all requests lie behind one another, without padding. The keys and values of a request lie in blocks of the
cache, in any order; its row of the block table says where. A query sees the keys up to its own position. With a row
format pages hold bytes in place of numbers.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.kv_quant import INT4, RowFormat
from smelt.kernels.linear import REFERENCE, asked_for

CPU, GPU = "cpu-compiled", "gpu-triton"


@dataclass(frozen=True)
class Pages:
    """Which tokens belong to whom, and where their keys and values lie. All tensors are int32 but `places`."""

    starts: Tensor  # [requests + 1]: where the new tokens of each request begin
    lengths: Tensor  # [requests]: tokens of each request in the cache, the new ones included
    tables: Tensor  # [requests, most blocks]: its blocks in order
    places: Tensor  # [tokens], int64: where each new token's keys and values go, block * size + offset
    longest: int = 0  # of `lengths`, at most
    counts: Sequence[int] = ()  # new tokens of each request, where they are known here
    # Where clusters of heads have pages of their own, tables are [slots, clusters, most blocks], and:
    slots: Tensor | None = None  # [requests], int64: each one's row of them
    shifts: Tensor | None = None  # [slots, clusters]: tokens that a cluster holds, less those of the text


class LayerPages(NamedTuple):
    """The keys and values of a layer, [blocks, size, heads of a block, width]."""

    keys: Tensor
    values: Tensor
    kv_heads: int
    cluster: Tensor | None = None  # [kv heads], int64: where pages belong to clusters, and blocks have one head
    column: Tensor | None = None  # [kv heads], int64: its place in the cluster
    columns: int = 0
    rows: RowFormat | None = None  # where the last axis is of bytes


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a processor, memory that the system gives when it is first written: to fill gigabytes takes seconds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    octets = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(octets).view(dtype).view(shape)


def write_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, places: Tensor) -> None:
    """Put the keys and values [tokens, kv heads, head size] of new tokens into the cache [blocks, size, ...]. A place
    of -1 belongs to a token that only fills a buffer."""
    if places.device.type == "cpu" and bool((places < 0).any()):
        real = places >= 0
        keys, values, places = keys[real], values[real], places[real]
    key_pages.flatten(0, 1).index_copy_(0, places, keys)
    value_pages.flatten(0, 1).index_copy_(0, places, values)


def attention_path(queries: Tensor, key_pages: Tensor, rows: RowFormat | None = None) -> str:
    """What computes attention over such pages: a kernel, or the reference, which `using` can ask for."""
    if asked_for() == REFERENCE.name:
        return REFERENCE.name
    if queries.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return GPU
    narrow = queries.shape[-1] <= 256 and queries.shape[1] // key_pages.shape[2] <= 16
    narrow = narrow and (rows is None or has_lanes(rows))
    known = queries.dtype in (torch.float32, torch.bfloat16)
    return CPU if queries.device.type == "cpu" and narrow and known and _library() is not None else REFERENCE.name


def has_lanes(rows: RowFormat) -> bool:
    """Whether sixteen codes in a row lie beside each other, as compiled code reads them."""
    return rows.name != INT4 or rows.half % 16 == 0


def paged_attention(
    queries: Tensor, key_pages: Tensor, value_pages: Tensor, pages: Pages, scale: float, window: int | None = None,
    rows: RowFormat | None = None,
) -> Tensor:  # [tokens, heads, head size] -> the same  # fmt: skip
    """By the fastest way there is."""
    path = attention_path(queries, key_pages, rows)
    if path == CPU:
        from smelt.kernels.cpu.program import attention

        return attention(_library(), queries, key_pages, value_pages, pages, scale, window, rows)
    if path == GPU:
        from smelt.kernels.gpu.paged import paged_prefill

        return paged_prefill(queries, key_pages, value_pages, pages, scale, window, rows=rows)
    return paged_reference(queries, key_pages, value_pages, pages, scale, window, rows)


@lru_cache(maxsize=1)
def _library() -> Any:
    from smelt.kernels.cpu.build import load_library
    from smelt.kernels.cpu.program import can_run

    library = load_library()
    return library if library is not None and can_run(library) else None


def paged_reference(
    queries: Tensor, key_pages: Tensor, value_pages: Tensor, pages: Pages, scale: float, window: int | None = None,
    rows: RowFormat | None = None,
) -> Tensor:  # [tokens, heads, head size] -> the same  # fmt: skip
    """One request after the other, its keys and values gathered. With a window a query sees only so many positions."""
    size = key_pages.shape[1]
    result = torch.zeros_like(queries)
    starts, lengths = pages.starts.tolist(), pages.lengths.tolist()
    for row, (start, stop, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if stop == start:
            continue
        blocks = pages.tables[row, : math.ceil(length / size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (key_pages, value_pages)
        )  # [1, kv heads, length, head size]
        if rows is not None:
            keys, values = (rows.decode(each, queries.dtype) for each in (keys, values))
        mask = visible(stop - start, length, window, queries.device)
        mine = queries[start:stop].transpose(0, 1)[None]
        found = F.scaled_dot_product_attention(mine, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        result[start:stop] = found[0].transpose(0, 1)
    return result


def visible(new: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Which of `length` positions each of the last `new` sees. [new, length]"""
    query = torch.arange(length - new, length, device=device)[:, None]
    key = torch.arange(length, device=device)[None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
