"""Knorm: keys with a small L2 norm get more attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from smelt.kvcache.eviction.scorer import SCORERS, AttentionInputs, Scorer


@SCORERS.register(
    "knorm",
    paper="Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, EMNLP 2024 "
    "(arXiv 2406.11430)",
)
@dataclass(frozen=True)
class Knorm(Scorer):
    """Score by -||k||: the cheapest scorer, without queries or attention."""

    def score(self, inputs: AttentionInputs) -> Tensor:
        return -inputs.keys.float().norm(dim=-1)
