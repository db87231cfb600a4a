"""NuC, novelty under compression (InfiniPot, arXiv 2410.01518): -log p(x_t | cache), the surprise of each token.

It is computed from the hidden states that reading the previous token produces anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LOGIT_ROWS = 64  # computed at once


def token_novelty(hidden: Tensor, ids: Tensor, lm_head: nn.Module) -> Tensor:
    """Return -log p of tokens [tokens] after hidden states [tokens, hidden], float32; `LOGIT_ROWS` rows at a time."""
    losses = [
        F.cross_entropy(lm_head(states).float(), targets, reduction="none")
        for states, targets in zip(hidden.split(LOGIT_ROWS), ids.split(LOGIT_ROWS), strict=True)
    ]
    return torch.cat(losses) if losses else hidden.new_zeros(0, dtype=torch.float32)


class NoveltyTracker:
    """Novelty of the tokens that all heads of all layers hold: those since the last compression, and those retained for
    their novelty. A token that only some heads retained is dropped, since it cannot be retained for all of them."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.token_indices = torch.zeros(capacity, dtype=torch.int64, device=device)  # rising
        self.novelty = torch.zeros(capacity, dtype=torch.float32, device=device)
        self.length = 0

    @property
    def nbytes(self) -> int:
        return self.token_indices.nbytes + self.novelty.nbytes

    def add(self, first: int, novelty: Tensor) -> None:
        """Add tokens [new], the first of them with this index."""
        end = self.length + len(novelty)
        self.token_indices[self.length : end] = torch.arange(
            first, first + len(novelty), device=self.token_indices.device
        )
        self.novelty[self.length : end] = novelty
        self.length = end

    def keep_top(self, count: int) -> Tensor:
        """Keep the most novel tokens and return their indices, rising."""
        order = self.novelty[: self.length].argsort(descending=True, stable=True)[:count].sort().values
        self.token_indices[: len(order)], self.novelty[: len(order)] = self.token_indices[order], self.novelty[order]
        self.length = len(order)
        return self.token_indices[: self.length].clone()

    def copy(self, capacity: int) -> NoveltyTracker:
        """Copy into a tracker with this capacity, at least the current length."""
        tracker = NoveltyTracker(capacity, self.token_indices.device)
        tracker.token_indices[: self.length] = self.token_indices[: self.length]
        tracker.novelty[: self.length] = self.novelty[: self.length]
        tracker.length = self.length
        return tracker
