"""What a plan is made from: the layers of a model, and the machines that share them.

Sharded data parallel (ZeRO stage 3, Rajbhandari et al., SC 2020) keeps an n-th of parameters, gradients and the
optimiser's state on each of n workers, gathers a layer's parameters before they are used and scatters the sums of its
gradients: three times the parameters travel in a step, against twice in plain data parallel. (That parameters,
gradients and Adam's state are 16 bytes a parameter, and the volumes, are from general knowledge; ZeRO was not read.)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from smelt.errors import ConfigError


@dataclass(frozen=True)
class LayerProfile:
    """A module that is called as one."""

    name: str
    bytes: int  # of its parameters
    forward: float  # seconds
    backward: float  # seconds
    activations: int = 0  # bytes that forward keeps for backward


@dataclass(frozen=True)
class ModelProfile:
    """Layers in the order of forward, and all that is in none of them: parameters of the root, and its computing.

    The root's parameters are there during the whole step; what it computes is thought to come after the last layer.
    """

    layers: tuple[LayerProfile, ...]
    rest: LayerProfile = LayerProfile("rest", 0, 0.0, 0.0)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("the model has no layers that could be sharded one by one.")

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers) + self.rest.bytes

    @property
    def computing(self) -> float:
        """Seconds of a step on one worker that waits for nobody."""
        return sum(layer.forward + layer.backward for layer in (*self.layers, self.rest))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class AlphaBeta:
    """A collective: seconds = alpha + beta * bytes that arrive at a worker."""

    alpha: float
    beta: float

    def time(self, size: float) -> float:
        return self.alpha + self.beta * size


@dataclass(frozen=True)
class ClusterSpec:
    """The workers that shard one model between them."""

    workers: int
    gather: AlphaBeta
    scatter: AlphaBeta
    memory: float  # bytes that a worker may use for parameters, gradients, optimiser and activations
    beside: bool = True  # collectives run beside computing, as on CUDA's streams; FSDP2 on a CPU waits for each
    kept: float = 4.0  # bytes of parameter, gradient and state for one byte of a parameter: 16 for 4 with Adam

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ConfigError("one worker alone has nobody to share a model with; plan for at least two.")
        if not self.memory > 0:
            raise ConfigError(f"memory is {self.memory:g} bytes; it must be above 0.")

    def gathering(self, size: int) -> float:
        """Seconds until so many bytes of parameters are whole on every worker."""
        return self.gather.time(size * (self.workers - 1) / self.workers)

    def scattering(self, size: int) -> float:
        """Seconds until the sums of so many bytes of gradients are where they belong."""
        return self.scatter.time(size * (self.workers - 1) / self.workers)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
