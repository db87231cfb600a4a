"""Knorm: keys of small norm are those that get attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from smelt.kvcache.eviction.scorer import AttentionInputs, Scorer


@dataclass(frozen=True)
class Knorm(Scorer):
    """-||k||."""

    name: ClassVar[str] = "knorm"
    paper: ClassVar[str] = (
        "Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, EMNLP 2024 "
        "(arXiv 2406.11430)"
    )

    def score(self, seen: AttentionInputs) -> Tensor:
        return -seen.keys.float().norm(dim=-1)
