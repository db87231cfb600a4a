"""A frame rule says which tokens of a full pot of frames stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class FrameTokens:
    """What one layer holds of the frames so far. Each head has tokens of its own, in the order of time."""

    keys: Tensor  # [kv_heads, tokens, width], as they lie in the cache
    patch: Tensor  # [kv_heads, tokens]: which patch of its frame a token is
    marks: Tensor  # [kv_heads, tokens]: what the rule noted when the token was new; empty where it notes nothing
    patches: int  # of a frame

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    @property
    def frames(self) -> int:
        """As many whole frames the tokens would be."""
        return self.tokens // self.patches


@dataclass(frozen=True)
class FrameRule(ABC):
    """Its fields are its parameters."""

    name: ClassVar[str]
    paper: ClassVar[str]
    marked: ClassVar[bool] = False  # notes something with every token: `marks`

    @property
    def shaped(self) -> bool:
        """Whether it notes something by rows and columns of the patches, which must then be known."""
        return False

    @abstractmethod
    def places(self, held: FrameTokens, count: int) -> Tensor:
        """Which tokens each head keeps: [kv_heads, count], rising."""

    def marks(self, values: Tensor, layer: int, layers: int) -> Tensor:
        """What is noted with tokens of whole new frames [kv_heads, frames, rows, columns, width], once, before any of
        them is lost: [kv_heads, frames, rows, columns]."""
        raise NotImplementedError

    def check(self, frames: int, keep: int) -> None:
        """Refuse a pot of so many frames, of which so many are kept, where the rule cannot work with it."""
        return
