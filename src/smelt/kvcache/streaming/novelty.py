"""NuC, novelty under compression (InfiniPot, arXiv 2410.01518): how little a token was foreseen, -log p(x_t | what the
pot held). It is taken from the hidden states that reading the token before it has left anyway."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 64  # of logits, held at once


def token_novelty(hidden: Tensor, ids: Tensor, head: nn.Module) -> Tensor:
    """-log p of tokens [tokens] after hidden states [tokens, width], float32; never more than `ROWS` rows of logits."""
    found = [
        F.cross_entropy(head(states).float(), wanted, reduction="none")
        for states, wanted in zip(hidden.split(ROWS), ids.split(ROWS), strict=True)
    ]
    return torch.cat(found) if found else hidden.new_zeros(0, dtype=torch.float32)


class NoveltyTracker:
    """How novel the tokens are that all heads of all layers hold: those that came since the pot was last cooked down,
    and those that stayed for their novelty. A token that only some heads held on to is no longer in it, since it could
    not be kept for all of them."""

    def __init__(self, cap: int, device: torch.device) -> None:
        self.numbers = torch.zeros(cap, dtype=torch.int64, device=device)  # of tokens, rising
        self.novelty = torch.zeros(cap, dtype=torch.float32, device=device)
        self.length = 0

    @property
    def bytes(self) -> int:
        return self.numbers.nbytes + self.novelty.nbytes

    def add(self, first: int, novelty: Tensor) -> None:
        """Tokens [new] that came, the first of them with this number."""
        end = self.length + len(novelty)
        self.numbers[self.length : end] = torch.arange(first, first + len(novelty), device=self.numbers.device)
        self.novelty[self.length : end] = novelty
        self.length = end

    def keep(self, count: int) -> Tensor:
        """The numbers of the most novel ones, in rising order; the others are forgotten."""
        order = self.novelty[: self.length].argsort(descending=True, stable=True)[:count].sort().values
        self.numbers[: len(order)], self.novelty[: len(order)] = self.numbers[order], self.novelty[order]
        self.length = len(order)
        return self.numbers[: self.length].clone()

    def copy(self, cap: int) -> NoveltyTracker:
        """The same with room for so many tokens, at least those in it."""
        found = NoveltyTracker(cap, self.numbers.device)
        found.numbers[: self.length] = self.numbers[: self.length]
        found.novelty[: self.length] = self.novelty[: self.length]
        found.length = self.length
        return found
