"""What the attention of one layer saw of a prompt, as scorers are given it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Turn = Callable[[Tensor, int], Tensor]  # vectors [..., tokens, width] and the position of the first: turned by rotary


@dataclass(frozen=True)
class Seen:
    """One layer, one prompt or several of the same length, or a piece of one. Keys are as they lie in the cache, turned
    by their positions; queries are those of the same tokens, or of the last of them, before they are turned, so that a
    scorer can turn them itself (none, where the scorer does not ask for such). Positions count from the first key."""

    keys: Tensor  # [batch, kv_heads, tokens, width]
    values: Tensor  # [batch, kv_heads, tokens, width]
    queries: Tensor  # [batch, heads, tokens or fewer, width]
    turn: Turn
    scale: float  # of the products of queries and keys
    repeated: Tensor | None = None  # [batch, kv_heads, tokens]: the most attention while the prompt is repeated
    turned: Tensor | None = None  # the queries, or the last of them, turned: where they are at hand

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.queries.shape[1] // self.keys.shape[1]
