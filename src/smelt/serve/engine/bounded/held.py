"""What a request knows of its pot beside the pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from smelt.kvcache.streaming.novelty import NoveltyTracker


@dataclass(eq=False)
class BoundedCacheState:
    """`ledger` is of the tokens in the pot, `coming` [1] how novel the one is that comes next: infinitely, before the
    first."""

    ledger: NoveltyTracker
    coming: Tensor
    source: list[int] = field(default_factory=list)  # pages of another's pot, to be copied before anything is read

    @classmethod
    def empty(cls, cap: int, device: torch.device) -> BoundedCacheState:
        return cls(NoveltyTracker(cap, device), torch.full((1,), torch.inf, device=device))

    def at_rest(self) -> BoundedCacheState:
        """While nobody reads on: no larger than what is in the pot."""
        return BoundedCacheState(self.ledger.copy(self.ledger.length), self.coming)

    def begun(self, cap: int, source: list[int]) -> BoundedCacheState:
        """To read on from, beside another that does; a pot holds at most `cap` tokens."""
        return BoundedCacheState(self.ledger.copy(cap), self.coming, list(source))

    def take(self, first: int, after: Tensor) -> None:
        """Tokens were laid into the pot, the first of them with this number; `after` [tokens] is how novel the token
        behind each of them is."""
        self.ledger.add(first, torch.cat((self.coming, after[:-1])))
        self.coming = after[-1:]
