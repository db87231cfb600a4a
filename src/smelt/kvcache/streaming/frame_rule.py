"""Frame rules: which tokens of a full bounded cache of video frames are retained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from smelt.registry import Registry


@dataclass(frozen=True)
class FrameTokens:
    """Frame tokens in the cache of one layer. Each head has its own tokens, in order of time."""

    keys: Tensor  # [kv_heads, tokens, head_dim], as cached
    patch_index: Tensor  # [kv_heads, tokens]: position of a token in its frame
    token_scores: Tensor  # [kv_heads, tokens]: what the rule computed when the token was new; may be empty
    patches_per_frame: int

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[1]

    @property
    def num_frames(self) -> int:
        """Tokens in units of full frames."""
        return self.num_tokens // self.patches_per_frame


@dataclass(frozen=True)
class FrameRule(ABC):
    """Base class; fields are parameters."""

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    needs_token_scores: ClassVar[bool] = False

    @property
    def needs_grid(self) -> bool:
        """Whether token scores need the rows and columns of the patches."""
        return False

    @abstractmethod
    def select(self, tokens: FrameTokens, count: int) -> Tensor:
        """Return the slots that each head retains: [kv_heads, count], rising."""

    def token_scores(self, values: Tensor, layer: int, num_layers: int) -> Tensor:
        """Score the tokens of full new frames [kv_heads, frames, rows, columns, head_dim] once, before any of them is
        evicted: [kv_heads, frames, rows, columns]."""
        raise NotImplementedError

    def check(self, max_frames: int, keep_frames: int) -> None:
        """Refuse sizes that the rule cannot work with."""
        return


FRAME_RULES: Registry[FrameRule] = Registry("frame rule")
