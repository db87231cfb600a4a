"""A sharding plan for FSDP2, and what it is made from: the costs of a model's layers and of the cluster's collectives.

Fully sharded data parallel (ZeRO stage 3, Rajbhandari et al., SC 2020) keeps 1/n of parameters, gradients and optimizer
state on each of n ranks, all-gathers a layer's parameters before they are used and reduce-scatters its gradients: three
times the parameters travel per step, against twice with plain data parallel. (The 16 bytes per parameter of Adam in
float32 and these volumes are general knowledge; the paper was not read.)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.link import AlphaBeta

MAX_PREFETCH = 2  # units: more in flight would cost memory without being needed sooner
MIN_BACKWARD_PREFETCH = 1  # FSDP2 always gathers one unit ahead in backward


@dataclass(frozen=True)
class LayerProfile:
    """The costs of a module that is called as one."""

    name: str
    bytes: int  # of its parameters
    forward: float  # seconds
    backward: float  # seconds
    activations: int = 0  # bytes saved by forward for backward


@dataclass(frozen=True)
class ModelProfile:
    """Layers in the order of forward, and the root: parameters and compute that belong to no layer.

    The root's parameters stay gathered for the whole step; its compute is assumed to follow the last layer.
    """

    layers: tuple[LayerProfile, ...]
    root: LayerProfile = LayerProfile("root", 0, 0.0, 0.0)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("the model has no layers that can be sharded separately.")

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers) + self.root.bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ClusterSpec:
    """The ranks that shard one model."""

    world_size: int
    all_gather: AlphaBeta
    reduce_scatter: AlphaBeta
    memory: float  # bytes per rank for parameters, gradients, optimizer state and activations
    overlap: bool = True  # collectives overlap with compute, as on CUDA streams; on CPU FSDP2 waits for each
    state_factor: float = 4.0  # bytes of parameter, gradient and optimizer state per parameter byte: 16 / 4 for Adam

    def __post_init__(self) -> None:
        if self.world_size < 2:
            raise ConfigError("a single rank has nobody to shard a model with; plan for at least two.")
        if not self.memory > 0:
            raise ConfigError(f"memory is {self.memory:g} bytes; it must be above 0.")

    def all_gather_time(self, size: int) -> float:
        """Predict the seconds to all-gather `size` bytes of parameters."""
        return self.all_gather.time(size * (self.world_size - 1) / self.world_size)

    def reduce_scatter_time(self, size: int) -> float:
        """Predict the seconds to reduce-scatter `size` bytes of gradients."""
        return self.reduce_scatter.time(size * (self.world_size - 1) / self.world_size)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ShardUnit:
    """Layers `first` up to `stop`, all-gathered and reduce-scattered together."""

    first: int
    stop: int
    reshard_after_forward: bool  # free the gathered parameters after forward, and gather them again in backward

    def layers(self, model: ModelProfile) -> tuple[LayerProfile, ...]:
        return model.layers[self.first : self.stop]

    def names(self, model: ModelProfile) -> list[str]:
        return [layer.name for layer in self.layers(model)]


@dataclass(frozen=True)
class ShardingPlan:
    """Which layers form an FSDP unit, which units reshard after forward, and how many units to prefetch."""

    units: tuple[ShardUnit, ...]
    forward_prefetch: int = 1  # units to gather ahead of the one that computes
    backward_prefetch: int = 1

    def __post_init__(self) -> None:
        contiguous = all(unit.stop == following.first for unit, following in pairwise(self.units))
        if not self.units or self.units[0].first or not contiguous or any(u.first >= u.stop for u in self.units):
            raise ConfigError("the units of a plan must cover all layers, each once and in order.")
        if self.forward_prefetch < 0 or self.backward_prefetch < MIN_BACKWARD_PREFETCH:
            raise ConfigError(
                f"forward_prefetch must be at least 0 and backward_prefetch at least {MIN_BACKWARD_PREFETCH}."
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
