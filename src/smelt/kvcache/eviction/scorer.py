"""Scorers rank the tokens of a prompt for each KV head; the tokens with the highest scores are retained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.rope import RotateFn
from smelt.registry import Registry


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one attention layer: a prompt, a chunk of one, or a batch of equal length.

    Keys are as cached, after RoPE. Queries are those of the same tokens, or of the last of them, before RoPE, so that
    a scorer can rotate them itself (empty where the scorer does not need them). Positions count from the first key."""

    keys: Tensor  # [batch, kv_heads, tokens, head_dim]
    values: Tensor  # [batch, kv_heads, tokens, head_dim]
    queries: Tensor  # [batch, heads, <= tokens, head_dim]
    rotate: RotateFn
    scale: float  # softmax scale
    reconstruction: Tensor | None = None  # [batch, kv_heads, tokens]: max attention while the prompt is repeated
    rotated_queries: Tensor | None = None  # queries after RoPE, or the last of them, where available

    @property
    def seq_len(self) -> int:
        return self.keys.shape[2]

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads that share a KV head."""
        return self.queries.shape[1] // self.keys.shape[1]


@dataclass(frozen=True)
class Scorer(ABC):
    """Base class; fields are parameters. Tokens of `sink` and `window` are retained whatever their score."""

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    needs_reconstruction: ClassVar[bool] = False  # `AttentionInputs.reconstruction`: a second pass over the prompt
    needs_unrotated_queries: ClassVar[bool] = False  # `AttentionInputs.queries`; others use the last rotated ones

    sink: int = 4  # first tokens
    window: int = 32  # last tokens

    def __post_init__(self) -> None:
        for name in ("sink", "window"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{self.name}: {name} is {getattr(self, name)}; it must not be negative.")

    @abstractmethod
    def score(self, inputs: AttentionInputs) -> Tensor:
        """Score each token, higher is retained first: [batch, kv_heads, tokens], float32."""

    def scores(self, inputs: AttentionInputs) -> Tensor:
        """Score each token, with sink and window at infinity."""
        scores = self.score(inputs).float().clone()
        scores[..., : self.sink] = torch.inf
        scores[..., max(inputs.seq_len - self.window, 0) :] = torch.inf
        return scores


SCORERS: Registry[Scorer] = Registry("scorer")


def last_query_logits(inputs: AttentionInputs, count: int) -> Tensor:
    """Compute the scaled causal logits of the last `count` queries (or as many as there are) on all keys: [batch,
    kv_heads, group, count, tokens], float32."""
    count = min(count, (inputs.queries if inputs.rotated_queries is None else inputs.rotated_queries).shape[2])
    first = inputs.seq_len - count
    if inputs.rotated_queries is None:
        queries = inputs.rotate(inputs.queries[:, :, -count:], first)
    else:
        queries = inputs.rotated_queries[:, :, -count:]
    group = inputs.num_queries_per_kv
    grouped = queries.unflatten(1, (-1, group)).flatten(2, 3)  # [batch, kv_heads, group * count, head_dim]
    logits = _matmul_float32(grouped, inputs.keys) * inputs.scale
    positions = torch.arange(inputs.seq_len, device=logits.device)
    return logits.unflatten(2, (group, count)).masked_fill(positions > positions[first:, None], -torch.inf)


def _matmul_float32(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply [..., queries, head_dim] and [..., keys, head_dim] to [..., queries, keys], in float32. A GPU multiplies
    16-bit operands directly and accumulates in float32."""
    if keys.is_cuda and keys.dtype == queries.dtype and keys.dtype.itemsize == 2:
        logits = torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT, out_dtype=torch.float32)
        return logits.unflatten(0, keys.shape[:2])
    return queries.float() @ keys.float().mT
