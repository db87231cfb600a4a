"""StreamingLLM: retain the first tokens (attention sinks) and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.kvcache.eviction.scorer import SCORERS, AttentionInputs, Scorer


@SCORERS.register(
    "streaming",
    paper="Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024 (arXiv 2309.17453)",
)
@dataclass(frozen=True)
class Streaming(Scorer):
    """Score by position: the later the better. The cheapest baseline; forgets the middle of the prompt."""

    def score(self, inputs: AttentionInputs) -> Tensor:
        positions = torch.arange(inputs.seq_len, dtype=torch.float32, device=inputs.keys.device)
        return positions.expand(inputs.keys.shape[:3])
