"""KeyDiff: retain keys that point away from the mean direction of their head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from smelt.kvcache.eviction.scorer import SCORERS, AttentionInputs, Scorer


@SCORERS.register(
    "keydiff",
    paper="Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in "
    "Resource-Constrained Environments, NeurIPS 2025 (arXiv 2504.15364)",
)
@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Score keys by dissimilarity; needs no queries, so it suits prompts compressed before the question.

    -cos(k, a) with a = mean(k / ||k||) over the prompt; the paper compresses block by block."""

    def score(self, inputs: AttentionInputs) -> Tensor:
        directions = functional.normalize(inputs.keys.float(), dim=-1)
        anchor = functional.normalize(directions.mean(dim=2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(dim=-1)
