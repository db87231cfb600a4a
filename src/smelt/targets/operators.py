"""Operators whose latency a target provides: the two parts of a transformer block, as sizes."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_OF_DTYPE = {"float32": 4, "float16": 2, "bfloat16": 2}


def _check_dtype(dtype: str) -> None:
    if dtype not in BYTES_OF_DTYPE:
        raise ValueError(f"dtype must be one of {', '.join(BYTES_OF_DTYPE)}, not {dtype!r}")


@dataclass(frozen=True)
class AttentionOp:
    """Attention over `tokens` positions; with `kv_heads` below `heads`, it is grouped-query attention."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    batch: int = 1
    causal: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        if min(self.hidden, self.head_dim, self.tokens, self.batch) < 1 or min(self.heads, self.kv_heads) < 0:
            raise ValueError(f"sizes must be positive (only heads may be 0): {self}")
        if bool(self.heads) != bool(self.kv_heads) or (self.kv_heads and self.heads % self.kv_heads):
            raise ValueError(f"heads must be a multiple of kv_heads, not {self.heads} of {self.kv_heads}")

    def parameters(self) -> int:
        """Return the number of weights of the query, key, value and output projections."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden

    def macs(self) -> int:
        """Return multiply-adds of the projections and of scores and context, the latter halved if causal."""
        pairs = self.tokens * self.tokens
        products = 2 * self.heads * self.head_dim * pairs
        return self.batch * (self.tokens * self.parameters() + (products // 2 if self.causal else products))

    def bytes(self) -> int:
        """Return the size of the weights."""
        return self.parameters() * BYTES_OF_DTYPE[self.dtype]


@dataclass(frozen=True)
class FeedForwardOp:
    """Two linear layers with an activation between; `gated` adds a third that multiplies the activation."""

    hidden: int
    ffn_channels: int
    gated: bool
    tokens: int
    batch: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        if min(self.hidden, self.tokens, self.batch) < 1 or self.ffn_channels < 0:
            raise ValueError(f"sizes must be positive (only ffn_channels may be 0): {self}")

    def parameters(self) -> int:
        """Return the number of weights of the two or three linear layers."""
        return (3 if self.gated else 2) * self.ffn_channels * self.hidden

    def macs(self) -> int:
        """Return multiply-adds of the linear layers."""
        return self.batch * self.tokens * self.parameters()

    def bytes(self) -> int:
        """Return the size of the weights."""
        return self.parameters() * BYTES_OF_DTYPE[self.dtype]


Operator = AttentionOp | FeedForwardOp
