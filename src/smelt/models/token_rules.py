"""Rules that decide which tokens of a sequence a layer of an encoder keeps.

The importance of a token is the attention it receives: the mean over heads of the sum over queries of its attention
probabilities, divided by the number of tokens of the unpruned sequence (without padding), so that it depends neither on
padding nor on how many queries are left. The token that the head reads is protected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from smelt.errors import ModelError


@dataclass(frozen=True)
class TokenRule(ABC):
    """Which tokens each layer keeps, after its attention and before its feed-forward."""

    kind: ClassVar[str]

    @property
    def cumulative(self) -> bool:
        """Whether importance adds up over layers."""
        return False

    @property
    @abstractmethod
    def layers(self) -> int:
        """The number of layers."""

    @abstractmethod
    def drops(self, layer: int) -> bool:
        """Return whether a layer may drop tokens; if not, it needs no scores."""

    @abstractmethod
    def keep(self, scores: Tensor, present: Tensor, protected: Tensor, lengths: Tensor, layer: int) -> Tensor:
        """Return which of the `present` tokens stay, [batch, tokens].

        `scores`, `present` and `protected` are [batch, tokens]; `lengths` are those of the unpruned sequences, [batch].
        """

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ThresholdRule(TokenRule):
    """Drop the tokens whose importance is below the threshold of the layer."""

    thresholds: tuple[float, ...]
    relative: bool = False  # to the mean importance, which is one over the length: then the length does not matter

    kind: ClassVar[str] = "threshold"

    @property
    def layers(self) -> int:
        return len(self.thresholds)

    def drops(self, layer: int) -> bool:
        return self.thresholds[layer] > 0

    def keep(self, scores: Tensor, present: Tensor, protected: Tensor, lengths: Tensor, layer: int) -> Tensor:
        scores = scores * lengths[:, None] if self.relative else scores
        return present & ((scores >= self.thresholds[layer]) | protected)

    def to_json(self) -> dict[str, Any]:
        return {"rule": self.kind, "thresholds": list(self.thresholds), "relative": self.relative}


@dataclass(frozen=True)
class TopKRule(TokenRule):
    """Keep the most important tokens of each sequence, a fraction of its own length per layer; at least one."""

    fractions: tuple[float, ...]  # of the unpruned sequence, non-increasing
    sums_layers: bool = False  # importance adds up over layers, as in SpAtten

    kind: ClassVar[str] = "top-k"

    @property
    def cumulative(self) -> bool:
        return self.sums_layers

    @property
    def layers(self) -> int:
        return len(self.fractions)

    def drops(self, layer: int) -> bool:
        return self.fractions[layer] < 1

    def counts(self, lengths: Tensor) -> Tensor:
        """Return the tokens into each layer and left, [sequences, layers + 1], of sequences of these lengths."""
        return torch.stack([lengths, *(self._count(lengths, layer) for layer in range(self.layers))], dim=1)

    def keep(self, scores: Tensor, present: Tensor, protected: Tensor, lengths: Tensor, layer: int) -> Tensor:
        ranked = scores.masked_fill(~present, -torch.inf).masked_fill(protected, torch.inf)
        order = ranked.argsort(dim=1, descending=True, stable=True)
        ranks = order.argsort(dim=1)
        return present & (ranks < self._count(lengths, layer)[:, None])

    def to_json(self) -> dict[str, Any]:
        return {"rule": self.kind, "fractions": list(self.fractions), "sums_layers": self.sums_layers}

    def _count(self, lengths: Tensor, layer: int) -> Tensor:
        """Return how many tokens the layer keeps of sequences of these lengths."""
        kept = (self.fractions[layer] * lengths.double() - 1e-6).ceil()  # less than a rounding error is no token
        return kept.clamp(min=1).to(lengths.dtype)


def token_rule_from_json(value: Any, layers: int, where: str) -> TokenRule:
    """Return the rule that an untrusted file describes, checked for a network with this many layers."""
    broken = ModelError(f"{where}: the token pruning in smelt.json does not fit this network.")
    value = value if isinstance(value, dict) else {}
    name = {"threshold": "thresholds", "top-k": "fractions"}.get(str(value.get("rule")), "")
    numbers = value.get(name)
    if not isinstance(numbers, list) or len(numbers) != layers:
        raise broken
    if any(type(number) not in (int, float) or not 0 <= number <= 1e6 for number in numbers):
        raise broken
    values = tuple(map(float, numbers))
    if name == "thresholds" and type(value.get("relative")) is bool:
        return ThresholdRule(values, value["relative"])
    if (
        name != "fractions"
        or max(values) > 1
        or list(values) != sorted(values, reverse=True)
        or type(value.get("sums_layers")) is not bool
    ):
        raise broken
    return TopKRule(values, value["sums_layers"])
