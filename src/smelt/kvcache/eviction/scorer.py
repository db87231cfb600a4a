"""A scorer says how much each token of a prompt is worth to each head of keys. The frame keeps the best."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.attention_inputs import Seen


@dataclass(frozen=True)
class Scorer(ABC):
    """Its fields are its parameters. Tokens of `sink` and `window` are kept whatever their score."""

    name: ClassVar[str]
    paper: ClassVar[str]
    repeats: ClassVar[bool] = False  # needs `Seen.repeated`, which takes another pass over the prompt
    turns: ClassVar[bool] = False  # needs `Seen.queries`; all others are content with the last of them, turned

    sink: int = 4  # of the first tokens
    window: int = 32  # of the last ones

    def __post_init__(self) -> None:
        for name in ("sink", "window"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{self.name}: {name} is {getattr(self, name)}; it must not be negative.")

    @abstractmethod
    def score(self, seen: Seen) -> Tensor:
        """Higher is kept first. [batch, kv_heads, tokens], float32"""

    def scores(self, seen: Seen) -> Tensor:
        """The same, with what is always kept above everything else."""
        found = self.score(seen).float().clone()
        found[..., : self.sink] = torch.inf
        found[..., max(seen.tokens - self.window, 0) :] = torch.inf
        return found
