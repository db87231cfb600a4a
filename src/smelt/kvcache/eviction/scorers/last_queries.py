"""How the last queries of a prompt meet its keys."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.kvcache.eviction.attention_inputs import Seen


def last_logits(seen: Seen, count: int) -> Tensor:
    """The scaled products of the last `count` queries (or as many as there are) with all keys, minus infinity where a
    key comes after its query: [batch, kv_heads, group, count, tokens], float32."""
    count = min(count, (seen.queries if seen.turned is None else seen.turned).shape[2])
    first = seen.tokens - count
    if seen.turned is None:
        queries = seen.turn(seen.queries[:, :, -count:], first)
    else:
        queries = seen.turned[:, :, -count:]
    grouped = queries.unflatten(1, (-1, seen.group)).flatten(2, 3)  # [batch, kv_heads, group * count, width]
    products = _products(grouped, seen.keys) * seen.scale
    places = torch.arange(seen.tokens, device=products.device)
    return products.unflatten(2, (seen.group, count)).masked_fill(places > places[first:, None], -torch.inf)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """[..., queries, width] and [..., keys, width] -> [..., queries, keys], in float32. A GPU multiplies numbers of 16
    bits as they are, and adds up in float32."""
    if keys.is_cuda and keys.dtype == queries.dtype and keys.dtype.itemsize == 2:
        found = torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT, out_dtype=torch.float32)
        return found.unflatten(0, keys.shape[:2])
    return queries.float() @ keys.float().mT
