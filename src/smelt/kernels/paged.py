"""Attention over a paged cache: queries of many requests side by side, each against its own keys and values.

Tokens of all requests lie behind one another, without padding. The keys and values of a request lie in blocks of the
cache, in any order; its row of the block table says where. A query sees the keys up to its own position. With a row
format pages hold bytes in place of numbers.
"""

from __future__ import annotations

import importlib.util
import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.kv_quant import INT4, KVQuantFormat
from smelt.kernels.linear import REFERENCE, forced_backend

CPU, GPU = "cpu-compiled", "gpu-triton"


def allocate_kv_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a processor, memory that the system gives when it is first written: to fill gigabytes takes seconds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    octets = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(octets).view(dtype).view(shape)


def store_kv(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor) -> None:
    """Put the keys and values [tokens, kv heads, head size] of new tokens into the cache [blocks, size, ...]. A place
    of -1 belongs to a token that only fills a buffer."""
    if slot_mapping.device.type == "cpu" and bool((slot_mapping < 0).any()):
        real = slot_mapping >= 0
        keys, values, slot_mapping = keys[real], values[real], slot_mapping[real]
    key_pages.flatten(0, 1).index_copy_(0, slot_mapping, keys)
    value_pages.flatten(0, 1).index_copy_(0, slot_mapping, values)


def attention_backend(queries: Tensor, key_pages: Tensor, kv_quant: KVQuantFormat | None = None) -> str:
    """What computes attention over such pages: a kernel, or the reference, which `using` can ask for."""
    if forced_backend() == REFERENCE.name:
        return REFERENCE.name
    if queries.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return GPU
    narrow = queries.shape[-1] <= 256 and queries.shape[1] // key_pages.shape[2] <= 16
    narrow = narrow and (kv_quant is None or has_lanes(kv_quant))
    known = queries.dtype in (torch.float32, torch.bfloat16)
    return CPU if queries.device.type == "cpu" and narrow and known and _library() is not None else REFERENCE.name


def has_lanes(rows: KVQuantFormat) -> bool:
    """Whether sixteen codes in a row lie beside each other, as compiled code reads them."""
    return rows.name != INT4 or rows.half_dim % 16 == 0


def paged_attention(
    queries: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: AttentionMetadata, scale: float,
    window: int | None = None, kv_quant: KVQuantFormat | None = None,
) -> Tensor:  # [tokens, heads, head size] -> the same  # fmt: skip
    """By the fastest way there is."""
    path = attention_backend(queries, key_pages, kv_quant)
    if path == CPU:
        from smelt.kernels.cpu.program import attention

        return attention(_library(), queries, key_pages, value_pages, metadata, scale, window, kv_quant)
    if path == GPU:
        from smelt.kernels.gpu.paged import paged_prefill

        return paged_prefill(queries, key_pages, value_pages, metadata, scale, window, kv_quant=kv_quant)
    return paged_attention_reference(queries, key_pages, value_pages, metadata, scale, window, kv_quant)


@lru_cache(maxsize=1)
def _library() -> Any:
    from smelt.kernels.cpu.build import load_library
    from smelt.kernels.cpu.program import can_run

    library = load_library()
    return library if library is not None and can_run(library) else None


def paged_attention_reference(
    queries: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: AttentionMetadata, scale: float,
    window: int | None = None, kv_quant: KVQuantFormat | None = None,
) -> Tensor:  # [tokens, heads, head size] -> the same  # fmt: skip
    """One request after the other, its keys and values gathered. With a window a query sees only so many positions."""
    size = key_pages.shape[1]
    result = torch.zeros_like(queries)
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
    for row, (start, stop, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if stop == start:
            continue
        blocks = metadata.block_tables[row, : math.ceil(length / size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (key_pages, value_pages)
        )  # [1, kv heads, length, head size]
        if kv_quant is not None:
            keys, values = (kv_quant.dequantize(each, queries.dtype) for each in (keys, values))
        mask = causal_mask(stop - start, length, window, queries.device)
        mine = queries[start:stop].transpose(0, 1)[None]
        found = F.scaled_dot_product_attention(mine, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        result[start:stop] = found[0].transpose(0, 1)
    return result


def causal_mask(new: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Which of `length` positions each of the last `new` sees. [new, length]"""
    query = torch.arange(length - new, length, device=device)[:, None]
    key = torch.arange(length, device=device)[None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
