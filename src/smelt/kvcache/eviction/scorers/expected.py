"""ExpectedAttention: expected attention of future queries, modeled as Gaussian like those of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.scorer import SCORERS, AttentionInputs, Scorer


@SCORERS.register(
    "expected",
    paper="Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries "
    "Distribution, 2025 (arXiv 2510.00636)",
)
@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Estimate the attention of future queries; use it where questions come after the prompt is compressed.

    With mu and Sigma of a head's queries before RoPE and R the mean rotation over the next `future` positions:
    E[exp(q.k)] = exp((R mu).k + k^T R Sigma R^T k / 2), normalized over the keys past `sink` (as kvpress does) and
    averaged over the group, is p; the score is (p + eps) ||v||."""

    needs_unrotated_queries: ClassVar[bool] = True

    future: int = 512  # positions after the prompt
    eps: float = 0.0  # added to every probability; 0 in kvpress, 0.01 in Tangram
    skip: int = 4  # first queries to leave out, which are outliers

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.future < 1:
            raise ConfigError(f"expected: future is {self.future}; it must be at least 1 position.")
        for name in ("eps", "skip"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"expected: {name} is {getattr(self, name)}; it must not be negative.")

    def score(self, inputs: AttentionInputs) -> Tensor:
        scores = inputs.keys.new_full(inputs.keys.shape[:3], torch.inf, dtype=torch.float32)
        attention = self._logits(inputs).softmax(dim=-1).mean(dim=2)  # [batch, kv_heads, tokens past sink]
        scores[..., self.sink :] = (attention + self.eps) * inputs.values[..., self.sink :, :].float().norm(dim=-1)
        return scores

    def _logits(self, inputs: AttentionInputs) -> Tensor:
        """Return the logits of the keys past `sink`: [batch, kv_heads, group, tokens past sink]. R^T is applied to the
        keys rather than R to mu and Sigma."""
        keys = inputs.keys[..., self.sink :, :].float() @ self._rotation(inputs) * inputs.scale
        skip = min(self.skip, inputs.queries.shape[2] - 1)
        queries = inputs.queries[:, :, skip:].float().unflatten(1, (-1, inputs.num_queries_per_kv))
        mean = queries.mean(dim=3)  # [batch, kv_heads, group, head_dim]
        centered = queries - mean[:, :, :, None]
        covariance = centered.mT @ centered / queries.shape[3]  # [batch, kv_heads, group, head_dim, head_dim]
        spread = torch.einsum("bktd,bkgde->bkgte", keys, covariance)
        return mean @ keys.mT + (spread * keys[:, :, None]).sum(dim=-1) / 2

    def _rotation(self, inputs: AttentionInputs) -> Tensor:
        """Return R [head_dim, head_dim]: its columns are the unit vectors, averaged over their rotations to each future
        position."""
        head_dim = inputs.keys.shape[-1]
        units = torch.eye(head_dim, device=inputs.keys.device)[:, None].expand(head_dim, self.future, head_dim)
        return inputs.rotate(units, inputs.seq_len).float().mean(dim=1).mT
