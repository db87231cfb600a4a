"""Attention over a paged KV cache: the queries of many requests, each over its own keys and values.

The tokens of all requests are concatenated without padding. The KV cache of a request is spread over blocks in any
order, given by its row of the block table. A query attends to the positions up to its own. With a `KVQuantFormat` pages
hold quantized rows in bytes; queries are rotated as its keys are, and the output is not rotated.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.attention_metadata import AttentionMetadata, AttentionVariant
from smelt.kernels.dispatch import CPU, GPU, REFERENCE, has_triton, select_backend
from smelt.kernels.kv_quant import KVQuantFormat

MAX_HEAD_DIM, MAX_QUERIES_PER_KV_HEAD = 256, 16  # of the compiled CPU kernel


def allocate_kv_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros. On CPU, memory that the system maps on first write: filling gigabytes would take seconds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    buffer = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(buffer).view(dtype).view(shape)


def store_kv(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values [tokens, kv heads, head_dim] to their slots of the cache [blocks, block_size, ...].

    Slot -1 marks padding tokens.
    """
    if slot_mapping.device.type == "cpu" and bool((slot_mapping < 0).any()):
        real = slot_mapping >= 0
        keys, values, slot_mapping = keys[real], values[real], slot_mapping[real]
    key_pages.flatten(0, 1).index_copy_(0, slot_mapping, keys)
    value_pages.flatten(0, 1).index_copy_(0, slot_mapping, values)


def attention_backend(queries: Tensor, key_pages: Tensor, kv_quant: KVQuantFormat | None = None) -> str:
    """Return the backend that computes attention over such pages."""
    return select_backend(
        "paged attention",
        (
            (GPU, lambda: queries.device.type == "cuda" and has_triton()),
            (CPU, lambda: _cpu_supports(queries, key_pages, kv_quant)),
        ),
    )


def _cpu_supports(queries: Tensor, key_pages: Tensor, kv_quant: KVQuantFormat | None) -> bool:
    group_size = queries.shape[1] // key_pages.shape[2]
    fits = queries.shape[-1] <= MAX_HEAD_DIM and group_size <= MAX_QUERIES_PER_KV_HEAD
    fits = fits and (kv_quant is None or kv_quant.is_simd_aligned)
    dtypes = (torch.float32, torch.bfloat16)
    return queries.device.type == "cpu" and fits and queries.dtype in dtypes and _library() is not None


def paged_attention(
    queries: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: AttentionMetadata, scale: float,
    window: int | None = None, kv_quant: KVQuantFormat | None = None, variant: AttentionVariant | None = None,
) -> Tensor:  # [tokens, heads, head_dim] -> the same shape  # fmt: skip
    """Compute attention with the fastest backend; soft-capping and chunks have none but the reference."""
    sinks = None if variant is None or variant.sinks is None else variant.sinks.float()
    backend = attention_backend(queries, key_pages, kv_quant)
    if variant is not None and (variant.softcap is not None or variant.chunk is not None):
        backend = REFERENCE
    if backend == CPU:
        from smelt.kernels.cpu.program import attention

        return attention(_library(), queries, key_pages, value_pages, metadata, scale, window, kv_quant, sinks)
    if backend == GPU:
        from smelt.kernels.gpu.paged import paged_prefill

        return paged_prefill(queries, key_pages, value_pages, metadata, scale, window, kv_quant=kv_quant, sinks=sinks)
    return paged_attention_reference(queries, key_pages, value_pages, metadata, scale, window, kv_quant, variant)


@lru_cache(maxsize=1)
def _library() -> Any:
    from smelt.kernels.cpu.build import load_library
    from smelt.kernels.cpu.program import can_run

    library = load_library()
    return library if library is not None and can_run(library) else None


def paged_attention_reference(
    queries: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: AttentionMetadata, scale: float,
    window: int | None = None, kv_quant: KVQuantFormat | None = None, variant: AttentionVariant | None = None,
) -> Tensor:  # [tokens, heads, head_dim] -> the same shape  # fmt: skip
    """Gather the KV cache of one request at a time. `window` is the number of positions a query attends to."""
    block_size = key_pages.shape[1]
    output = torch.zeros_like(queries)
    starts, seq_lens = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
    for request, (start, stop, seq_len) in enumerate(zip(starts, starts[1:], seq_lens, strict=False)):
        if stop == start:
            continue
        blocks = metadata.block_tables[request, : math.ceil(seq_len / block_size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)[None] for cache in (key_pages, value_pages)
        )  # [1, kv heads, seq_len, head_dim]
        if kv_quant is not None:
            keys, values = kv_quant.dequantize(keys, queries.dtype), kv_quant.dequantize(values, queries.dtype)
        chunk = None if variant is None else variant.chunk
        mask = causal_mask(stop - start, seq_len, window, queries.device, chunk)
        query = queries[start:stop].transpose(0, 1)[None]
        if variant is None:
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            attended = _attention_variant(query, keys, values, mask, scale, variant)
        output[start:stop] = attended[0].transpose(0, 1)
    return output if kv_quant is None else kv_quant.unrotate(output)


def _attention_variant(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, variant: AttentionVariant
) -> Tensor:  # [1, heads, tokens, head_dim], [1, kv heads, seq_len, head_dim] twice -> as the query
    """Compute attention with soft-capped scores and sinks."""
    keys, values = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (keys, values))
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if variant.sinks is not None:
        sinks = variant.sinks.float().view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
    return probabilities @ values


def causal_mask(
    query_len: int, seq_len: int, window: int | None, device: torch.device, chunk: int | None = None
) -> Tensor:
    """Return which of `seq_len` positions each of the last `query_len` attends to, [query_len, seq_len] bool."""
    query = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key = torch.arange(seq_len, device=device)[None]
    mask = key <= query
    if chunk is not None:
        mask = mask & (key // chunk == query // chunk)
    return mask if window is None else mask & (key > query - window)
