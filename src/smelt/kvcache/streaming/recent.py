"""Recent: the last tokens stay; what a sliding window would do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.kvcache.streaming.frame_rule import FrameRule, FrameTokens


@dataclass(frozen=True)
class RecentFrames(FrameRule):
    """A baseline of InfiniPot-V."""

    name: ClassVar[str] = "recent"
    paper: ClassVar[str] = "the baseline `swa` of InfiniPot-V (arXiv 2506.15745)"

    def places(self, held: FrameTokens, count: int) -> Tensor:
        places = torch.arange(held.tokens - count, held.tokens, device=held.keys.device)
        return places.repeat(len(held.keys), 1)
