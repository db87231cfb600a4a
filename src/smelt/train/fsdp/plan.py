"""A plan: which layers are gathered together, which stay whole after forward, and how far ahead gathering runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from smelt.errors import ConfigError
from smelt.train.fsdp.facts import Layer, Model

MOST_AHEAD = 2  # units: more in flight would cost memory without being needed sooner
LEAST_BEHIND = 1  # FSDP2 always gathers one unit ahead in backward


@dataclass(frozen=True)
class Unit:
    """Layers `first` up to `stop`, gathered by one collective and scattered by one."""

    first: int
    stop: int
    reshard: bool  # given back after forward, and gathered again in backward

    def of(self, model: Model) -> tuple[Layer, ...]:
        return model.layers[self.first : self.stop]

    def names(self, model: Model) -> list[str]:
        return [layer.name for layer in self.of(model)]


@dataclass(frozen=True)
class Plan:
    units: tuple[Unit, ...]
    forward_ahead: int = 1  # units that forward gathers ahead of the one it computes
    backward_ahead: int = 1  # the same of backward

    def __post_init__(self) -> None:
        ordered = all(before.stop == after.first for before, after in pairwise(self.units))
        if not self.units or self.units[0].first or not ordered or any(u.first >= u.stop for u in self.units):
            raise ConfigError("the units of a plan must hold all layers, each once and in their order.")
        if self.forward_ahead < 0 or self.backward_ahead < LEAST_BEHIND:
            raise ConfigError(f"forward_ahead is at least 0 and backward_ahead at least {LEAST_BEHIND}.")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
