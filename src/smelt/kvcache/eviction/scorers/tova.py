"""TOVA: attention of the last query."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from smelt.kvcache.eviction.scorer import SCORERS, AttentionInputs, Scorer, last_query_logits


@SCORERS.register(
    "tova",
    paper="Oren et al., Transformers are Multi-State RNNs, EMNLP 2024 (arXiv 2401.06104)",
)
@dataclass(frozen=True)
class Tova(Scorer):
    """Score by the attention of the last query, averaged over query heads: the same for every KV head."""

    def score(self, inputs: AttentionInputs) -> Tensor:
        attention = last_query_logits(inputs, 1).softmax(dim=-1).mean(dim=(1, 2))  # [batch, 1, tokens]
        return attention.expand(inputs.keys.shape[:3])
