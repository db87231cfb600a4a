"""ExpectedAttention: the attention that queries to come will pay, if they are distributed as those of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.scorer import AttentionInputs, Scorer


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """With mu and Sigma of a head's queries before rotation and R the mean rotation over the next `future` positions:
    E[exp(q.k)] = exp((R mu).k + k^T R Sigma R^T k / 2), normalised over the keys past `sink` (as kvpress does) and
    averaged over the group, is p; the score is (p + eps) ||v||."""

    name: ClassVar[str] = "expected"
    paper: ClassVar[str] = (
        "Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries "
        "Distribution, 2025 (arXiv 2510.00636)"
    )

    needs_unrotated_queries: ClassVar[bool] = True

    future: int = 512  # positions after the prompt
    eps: float = 0.0  # added to every probability; 0 in kvpress, 0.01 in Tangram
    skip: int = 4  # of the first queries, which are outliers

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.future < 1:
            raise ConfigError(f"expected: future is {self.future}; it must be at least 1 position.")
        for name in ("eps", "skip"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"expected: {name} is {getattr(self, name)}; it must not be negative.")

    def score(self, seen: AttentionInputs) -> Tensor:
        found = seen.keys.new_full(seen.keys.shape[:3], torch.inf, dtype=torch.float32)
        attention = self._logits(seen).softmax(dim=-1).mean(dim=2)  # [batch, kv_heads, tokens past sink]
        found[..., self.sink :] = (attention + self.eps) * seen.values[..., self.sink :, :].float().norm(dim=-1)
        return found

    def _logits(self, seen: AttentionInputs) -> Tensor:
        """Of the keys past `sink`: [batch, kv_heads, group, tokens past sink]. R is applied to the keys, transposed,
        rather than to mu and Sigma."""
        keys = seen.keys[..., self.sink :, :].float() @ self._rotation(seen) * seen.scale
        skip = min(self.skip, seen.queries.shape[2] - 1)
        queries = seen.queries[:, :, skip:].float().unflatten(1, (-1, seen.num_queries_per_kv))
        mean = queries.mean(dim=3)  # [batch, kv_heads, group, width]
        centred = queries - mean[:, :, :, None]
        covariance = centred.mT @ centred / queries.shape[3]  # [batch, kv_heads, group, width, width]
        spread = torch.einsum("bktd,bkgde->bkgte", keys, covariance)
        return mean @ keys.mT + (spread * keys[:, :, None]).sum(dim=-1) / 2

    def _rotation(self, seen: AttentionInputs) -> Tensor:
        """R [width, width]: its columns are the unit vectors, turned to each position to come and averaged."""
        width = seen.keys.shape[-1]
        units = torch.eye(width, device=seen.keys.device)[:, None].expand(width, self.future, width)
        return seen.rotate(units, seen.seq_len).float().mean(dim=1).mT
