"""Base class of methods that keep a share of the tokens of every text, whatever it says: MACs follow from lengths."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from smelt.compression.token_pruning.base import TokenPruning, TokenPruningRun
from smelt.models.token_rules import TokenRule, TopKRule

_STEPS = 1000  # shares that are tried


@dataclass(frozen=True)
class FixedCounts(TokenPruning):
    """Keep the most important tokens of every text, by a number that its length decides."""

    sums_layers: ClassVar[bool]  # importance adds up over layers

    @abstractmethod
    def fractions(self, share: float, layers: int) -> tuple[float, ...]:
        """Return the share of the sequence that each layer keeps, from the one share that the budget decides."""

    def least_counts(self, lengths: Tensor, layers: int) -> Tensor:
        return TopKRule(self.fractions(0.0, layers)).counts(lengths)

    def find_rule(self, run: TokenPruningRun) -> tuple[TokenRule, dict[str, Any]]:
        """Return the rule with the largest share that meets the budget, by bisection: MACs grow with it."""
        low, high = 0, _STEPS
        while high - low > 1:
            middle = (low + high) // 2
            rule = self._rule(middle / _STEPS, run.layers)
            low, high = (middle, high) if run.macs(rule.counts(run.lengths)) <= run.allowed_macs else (low, middle)
        return self._rule(low / _STEPS, run.layers), {"share": low / _STEPS}

    def _rule(self, share: float, layers: int) -> TopKRule:
        return TopKRule(self.fractions(share, layers), self.sums_layers)
