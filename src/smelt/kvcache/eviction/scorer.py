"""A scorer says how much each token of a prompt is worth to each head of keys. The frame keeps the best."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.rope import RotateFn


@dataclass(frozen=True)
class AttentionInputs:
    """One layer, one prompt or several of the same length, or a piece of one. Keys are as they lie in the cache, turned
    by their positions; queries are those of the same tokens, or of the last of them, before they are turned, so that a
    scorer can turn them itself (none, where the scorer does not ask for such). Positions count from the first key."""

    keys: Tensor  # [batch, kv_heads, tokens, width]
    values: Tensor  # [batch, kv_heads, tokens, width]
    queries: Tensor  # [batch, heads, tokens or fewer, width]
    rotate: RotateFn
    scale: float  # of the products of queries and keys
    reconstruction: Tensor | None = None  # [batch, kv_heads, tokens]: the most attention while the prompt is repeated
    rotated_queries: Tensor | None = None  # the queries, or the last of them, turned: where they are at hand

    @property
    def seq_len(self) -> int:
        return self.keys.shape[2]

    @property
    def num_queries_per_kv(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.queries.shape[1] // self.keys.shape[1]


@dataclass(frozen=True)
class Scorer(ABC):
    """Its fields are its parameters. Tokens of `sink` and `window` are kept whatever their score."""

    name: ClassVar[str]
    paper: ClassVar[str]
    needs_reconstruction: ClassVar[bool] = False  # needs `Seen.repeated`, which takes another pass over the prompt
    needs_unrotated_queries: ClassVar[bool] = (
        False  # needs `Seen.queries`; all others are content with the last of them, turned
    )

    sink: int = 4  # of the first tokens
    window: int = 32  # of the last ones

    def __post_init__(self) -> None:
        for name in ("sink", "window"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{self.name}: {name} is {getattr(self, name)}; it must not be negative.")

    @abstractmethod
    def score(self, seen: AttentionInputs) -> Tensor:
        """Higher is kept first. [batch, kv_heads, tokens], float32"""

    def scores(self, seen: AttentionInputs) -> Tensor:
        """The same, with what is always kept above everything else."""
        found = self.score(seen).float().clone()
        found[..., : self.sink] = torch.inf
        found[..., max(seen.seq_len - self.window, 0) :] = torch.inf
        return found


def last_query_logits(seen: AttentionInputs, count: int) -> Tensor:
    """The scaled products of the last `count` queries (or as many as there are) with all keys, minus infinity where a
    key comes after its query: [batch, kv_heads, group, count, tokens], float32."""
    count = min(count, (seen.queries if seen.rotated_queries is None else seen.rotated_queries).shape[2])
    first = seen.seq_len - count
    if seen.rotated_queries is None:
        queries = seen.rotate(seen.queries[:, :, -count:], first)
    else:
        queries = seen.rotated_queries[:, :, -count:]
    grouped = queries.unflatten(1, (-1, seen.num_queries_per_kv)).flatten(
        2, 3
    )  # [batch, kv_heads, group * count, width]
    products = _products(grouped, seen.keys) * seen.scale
    places = torch.arange(seen.seq_len, device=products.device)
    return products.unflatten(2, (seen.num_queries_per_kv, count)).masked_fill(
        places > places[first:, None], -torch.inf
    )


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """[..., queries, width] and [..., keys, width] -> [..., queries, keys], in float32. A GPU multiplies numbers of 16
    bits as they are, and adds up in float32."""
    if keys.is_cuda and keys.dtype == queries.dtype and keys.dtype.itemsize == 2:
        found = torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT, out_dtype=torch.float32)
        return found.unflatten(0, keys.shape[:2])
    return queries.float() @ keys.float().mT
