"""TOVA: what the last token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from smelt.kvcache.eviction.scorer import AttentionInputs, Scorer, last_query_logits


@dataclass(frozen=True)
class Tova(Scorer):
    """The attention of the last query averaged over all heads of queries: the same for every head of keys."""

    name: ClassVar[str] = "tova"
    paper: ClassVar[str] = "Oren et al., Transformers are Multi-State RNNs, EMNLP 2024 (arXiv 2401.06104)"

    def score(self, seen: AttentionInputs) -> Tensor:
        attention = last_query_logits(seen, 1).softmax(dim=-1).mean(dim=(1, 2))  # [batch, 1, tokens]
        return attention.expand(seen.keys.shape[:3])
