"""Uniform frames: retain tokens at equal distances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.kvcache.streaming.frame_rule import FRAME_RULES, FrameRule, FrameTokens


@FRAME_RULES.register("uniform", paper="the baseline `uniform` of InfiniPot-V (arXiv 2506.15745)")
@dataclass(frozen=True)
class UniformFrames(FrameRule):
    """Retain slot floor(i * tokens / count) for each i of `count`; a baseline that covers the whole stream."""

    def select(self, tokens: FrameTokens, count: int) -> Tensor:
        slots = torch.arange(count, device=tokens.keys.device) * tokens.num_tokens // count
        return slots.repeat(len(tokens.keys), 1)
