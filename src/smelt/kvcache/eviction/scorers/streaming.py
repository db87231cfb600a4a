"""StreamingLLM: the first tokens and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.kvcache.eviction.scorer import AttentionInputs, Scorer


@dataclass(frozen=True)
class Streaming(Scorer):
    """The later a token the better; `sink` keeps the first ones."""

    name: ClassVar[str] = "streaming"
    paper: ClassVar[str] = (
        "Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024 (arXiv 2309.17453)"
    )

    def score(self, seen: AttentionInputs) -> Tensor:
        places = torch.arange(seen.seq_len, dtype=torch.float32, device=seen.keys.device)
        return places.expand(seen.keys.shape[:3])
