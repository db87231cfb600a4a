"""KeyDiff: keys that point away from the mean direction of their head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from smelt.kvcache.eviction.scorer import AttentionInputs, Scorer


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """-cos(k, a) with a = mean(k / ||k||) over the whole prompt; the paper compresses block after block."""

    name: ClassVar[str] = "keydiff"
    paper: ClassVar[str] = (
        "Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in "
        "Resource-Constrained Environments, NeurIPS 2025 (arXiv 2504.15364)"
    )

    def score(self, seen: AttentionInputs) -> Tensor:
        directions = functional.normalize(seen.keys.float(), dim=-1)
        anchor = functional.normalize(directions.mean(dim=2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(dim=-1)
