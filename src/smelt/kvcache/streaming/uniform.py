"""Uniform: every so many tokens one stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.kvcache.streaming.frame_rule import FrameRule, FrameTokens


@dataclass(frozen=True)
class UniformFrames(FrameRule):
    """A baseline of InfiniPot-V: place i of `count` is the whole part of i * tokens / count."""

    name: ClassVar[str] = "uniform"
    paper: ClassVar[str] = "the baseline `uniform` of InfiniPot-V (arXiv 2506.15745)"

    def places(self, held: FrameTokens, count: int) -> Tensor:
        places = torch.arange(count, device=held.keys.device) * held.tokens // count
        return places.repeat(len(held.keys), 1)
