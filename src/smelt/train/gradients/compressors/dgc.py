"""Deep Gradient Compression: velocity is accumulated in place of gradients, and forgotten where it was sent."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import Chosen, Independent, State, Step, count, require_positive
from smelt.train.gradients.layout import Layout

_SAMPLED = 0.01  # of a tensor
_TRIES = 10  # changes of a threshold
_FEW = 0.8  # of the target: below it the threshold falls by as much


@dataclass(frozen=True)
class DGC(Independent):
    """u = m u + g, v += u (Nesterov: u = m (u + g), v += u + g); select on |v| in each tensor of two or more
    dimensions, send vectors whole; u and v become zero where sent. The optimiser that follows must have no momentum.

    What is conserved is the velocity, which with momentum 0 is the gradient."""

    name: ClassVar[str] = "dgc"
    paper: ClassVar[str] = "Lin et al., Deep Gradient Compression, ICLR 2018 (arXiv 1712.01887)"

    agreement: str = "own"
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True  # velocity is forgotten where it was sent
    clip: float | None = None  # largest norm of the gradients of all workers; each is held to clip / sqrt(n)
    warm_up: int = 4  # epochs in which the density falls to its target
    epoch: int = 0  # steps of an epoch; 0: no warm-up
    seed: int = 0  # of the samples

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"dgc: momentum is {self.momentum:g}; it must be at least 0 and below 1.")
        if self.clip is not None:
            require_positive(self.name, "clip", self.clip)
        if self.warm_up < 0 or self.epoch < 0:
            raise ConfigError("dgc: warm_up and epoch must not be negative.")

    def start(self, layout: Layout, workers: int) -> State:
        return {"velocity": torch.zeros(layout.size)}

    def contribution(self, step: Step) -> Tensor:
        gradient, velocity = step.gradient, step.state["velocity"].to(step.memory.device)
        if self.clip is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient = gradient * (self.clip / step.workers.size**0.5 / norm.clamp_min(1e-12)).clamp_max(1.0)
        if self.nesterov:
            velocity = step.state["velocity"] = self.momentum * (velocity + gradient)
            return velocity + gradient
        velocity = step.state["velocity"] = self.momentum * velocity + gradient
        return velocity

    def choose(self, step: Step) -> Chosen:
        memory = step.add()
        density = self.density_at(step.number)
        own, whole = [], []
        for piece, values in step.layout.views(memory):
            if len(piece.shape) > 1 and piece.size:
                own.append(self._select(values, density, step) + piece.start)
            else:
                whole.append(torch.arange(piece.start, piece.stop, device=memory.device))
        nothing = memory.new_empty(0, dtype=torch.int64)
        return Chosen(torch.cat([nothing, *own]), torch.cat([nothing, *whole]))

    def settle(self, step: Step, sent: Tensor) -> None:
        if self.masking:
            several = [len(piece.shape) > 1 for piece in step.layout.pieces]
            sizes = torch.tensor([piece.size for piece in step.layout.pieces], device=sent.device)
            masked = torch.repeat_interleave(torch.tensor(several, device=sent.device), sizes)
            velocity = torch.cat([step.state["velocity"], step.memory.new_zeros(1)])  # empty slots point past its end
            velocity[sent[torch.cat([masked, masked.new_zeros(1)])[sent]]] = 0.0
            step.state["velocity"] = velocity[:-1]

    def density_at(self, number: int) -> float:
        """d^((e + 1) / (E + 1)) in epoch e of E: 0.25, 0.063, 0.016, 0.004, then 0.001."""
        epoch = number // self.epoch if self.epoch else self.warm_up
        return self.density ** ((min(epoch, self.warm_up) + 1) / (self.warm_up + 1))

    def _select(self, values: Tensor, density: float, step: Step) -> Tensor:
        """About the density's share of the largest elements, never more: [count] int64, ascending"""
        magnitudes, target = values.abs(), count(density, len(values))
        if target == len(values):
            return torch.arange(target, device=values.device)
        threshold = self._sampled(magnitudes, density, step)
        for _ in range(_TRIES):
            found = torch.nonzero(magnitudes >= threshold).flatten()
            if len(found) >= _FEW * target:
                break
            threshold = threshold * _FEW
        if len(found) > target:
            found = found[magnitudes[found].topk(target, sorted=False).indices].sort().values
        return found

    def _sampled(self, magnitudes: Tensor, density: float, step: Step) -> Tensor:
        """The smallest of the largest samples; a sample is every stride-th element from a random one on."""
        size = min(max(int(_SAMPLED * len(magnitudes)), ceil(2 / density)), len(magnitudes))
        stride = len(magnitudes) // size
        if stride > 32:
            stride = stride // 32 * 32 + 1
        generator = step.generator(self.seed, own=True)
        first = int(torch.randint(stride, (1,), generator=generator, device=magnitudes.device))
        sample = magnitudes[first::stride]
        return sample.topk(min(ceil(len(sample) * density), len(sample))).values[-1]
