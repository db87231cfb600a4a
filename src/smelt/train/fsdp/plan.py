"""A plan: which layers are gathered together, which stay whole after forward, and how far ahead gathering runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from smelt.errors import ConfigError
from smelt.train.fsdp.facts import LayerProfile, ModelProfile

MAX_PREFETCH = 2  # units: more in flight would cost memory without being needed sooner
MIN_BACKWARD_PREFETCH = 1  # FSDP2 always gathers one unit ahead in backward


@dataclass(frozen=True)
class ShardUnit:
    """Layers `first` up to `stop`, gathered by one collective and scattered by one."""

    first: int
    stop: int
    reshard_after_forward: bool  # given back after forward, and gathered again in backward

    def of(self, model: ModelProfile) -> tuple[LayerProfile, ...]:
        return model.layers[self.first : self.stop]

    def names(self, model: ModelProfile) -> list[str]:
        return [layer.name for layer in self.of(model)]


@dataclass(frozen=True)
class ShardingPlan:
    units: tuple[ShardUnit, ...]
    forward_prefetch: int = 1  # units that forward gathers ahead of the one it computes
    backward_prefetch: int = 1  # the same of backward

    def __post_init__(self) -> None:
        ordered = all(before.stop == after.first for before, after in pairwise(self.units))
        if not self.units or self.units[0].first or not ordered or any(u.first >= u.stop for u in self.units):
            raise ConfigError("the units of a plan must hold all layers, each once and in their order.")
        if self.forward_prefetch < 0 or self.backward_prefetch < MIN_BACKWARD_PREFETCH:
            raise ConfigError(f"forward_prefetch is at least 0 and backward_prefetch at least {MIN_BACKWARD_PREFETCH}.")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
