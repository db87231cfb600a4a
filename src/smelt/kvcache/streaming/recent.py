"""Recent frames: retain the last tokens, as a sliding window would."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.kvcache.streaming.frame_rule import FRAME_RULES, FrameRule, FrameTokens


@FRAME_RULES.register("recent", paper="the baseline `swa` of InfiniPot-V (arXiv 2506.15745)")
@dataclass(frozen=True)
class RecentFrames(FrameRule):
    """Retain the most recent tokens; a baseline that forgets everything older."""

    def select(self, tokens: FrameTokens, count: int) -> Tensor:
        slots = torch.arange(tokens.num_tokens - count, tokens.num_tokens, device=tokens.keys.device)
        return slots.repeat(len(tokens.keys), 1)
