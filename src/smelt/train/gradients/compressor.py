"""The contract of a gradient compressor: a frozen dataclass of checked parameters and a state of plain tensors.

A compressor holds no data of a run. What it must remember lies in the `State` it is handed, so that a checkpoint can
hold it; what a vector still has to send lies in the residual, which belongs to the frame (`reducer.py`). There are two
kinds. A `Sparsifier` says which elements travel; the frame agrees on them with the other workers, sends their values
and empties the residual there. A `Coder` writes all elements into a short message of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kernels.threshold_select import add_and_select, threshold_select
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.gradient_views import Given, Pieces, flat_of
from smelt.train.gradients.layout import Layout

State = dict[str, Tensor]  # elementwise parts have the length of the vector; all others are small and on the CPU

AGREEMENTS = ("union", "own")


@dataclass
class Step:
    """One vector in one step of training, as a compressor sees it."""

    number: int  # steps of this vector before this one
    given: Given  # what this step adds
    memory: Tensor  # [elements] float32: the residual; with what is given once it was added
    layout: Layout
    workers: Workers
    state: State
    counts: list[int]  # how many each worker chose in the step before; empty in the first
    slots: int | None = None  # a selection must have this length, whatever it holds; None: any
    added: bool = False

    @property
    def gradient(self) -> Tensor:
        """[elements] float32: what is given, side by side."""
        return flat_of(self.given)

    def add(self) -> Tensor:
        """The residual with what is given added to it, in place and once: what may be sent."""
        if not self.added:
            self.added = True
            self.given.add_to(self.memory) if isinstance(self.given, Pieces) else self.memory.add_(self.given)
        return self.memory

    def at(self, places: Tensor) -> Tensor:
        """What may be sent, at these places."""
        if self.added or isinstance(self.given, Pieces):
            return self.add()[places]
        return self.memory[places] + self.given[places]

    def above(self, threshold: float, start: int, stop: int) -> Tensor:
        """Where what may be sent reaches the threshold inside [start, stop), ascending; added in the same pass."""
        if self.added or isinstance(self.given, Pieces):
            return threshold_select(self.add(), threshold, start, stop, self.slots)
        self.added = True
        return add_and_select(self.memory, self.given, threshold, start, stop, self.slots)

    def generator(self, seed: int, own: bool) -> torch.Generator:
        """Random numbers that depend on the seed, the step and, if `own`, the worker; nothing needs to be saved."""
        place = self.workers.rank + 1 if own else 0
        generator = torch.Generator(device=self.memory.device)
        return generator.manual_seed(((seed * 1_000_003 + self.number) * 4_099 + place) % 2**63)


@dataclass(frozen=True)
class Compressor(ABC):
    """Its fields are its parameters."""

    name: ClassVar[str]
    paper: ClassVar[str]
    carried: ClassVar[tuple[str, ...]] = ()  # small state that stays true when the number of workers changes

    @abstractmethod
    def target(self, elements: int) -> float:
        """How many elements of a vector it means to send."""

    def start(self, layout: Layout, workers: int) -> State:
        """The state before the first step."""
        return {}

    def contribution(self, step: Step) -> Given:
        """What this step adds to the residual: the gradient, unless a method corrects it first."""
        return step.given

    @property
    def feeds_back(self) -> bool:
        """Whether what was not sent is kept for the next step."""
        return True


@dataclass(frozen=True)
class Chosen:
    """What one worker wants sent."""

    indices: Tensor  # [count] int64, ascending
    common: Tensor | None = None  # [count] int64: what all workers send whole, the same on each, outside `indices`


@dataclass(frozen=True)
class Sparsifier(Compressor):
    """Chooses elements; `density` is the share of all that it means to send."""

    density: float = 0.001  # above 0 and at most 1

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(
                f"{self.name}: density is {self.density:g}; it is the share of gradients that is sent, above 0 and "
                "at most 1."
            )

    @property
    @abstractmethod
    def route(self) -> str:
        """How the workers come to one set of indices.

        "exclusive": they choose in places that do not overlap, and all send all that anyone chose.
        "union": they choose anywhere, and all send all that anyone chose.
        "own": each sends what it chose itself, as pairs.
        "leader": all send what the worker `number mod n` chose.
        "known": all choose the same without a word.
        """

    @abstractmethod
    def choose(self, step: Step) -> Chosen:
        """Add the gradient to the residual and choose; every worker calls it in every step."""

    def settle(self, step: Step, sent: Tensor) -> None:
        """Told which elements this worker has sent: [count] int64."""

    def target(self, elements: int) -> float:
        return count(self.density, elements)


@dataclass(frozen=True)
class Independent(Sparsifier):
    """A sparsifier whose workers choose anywhere, each by itself."""

    agreement: str = "union"  # "union": all send all that anyone chose; "own": each sends what it chose

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.agreement not in AGREEMENTS:
            raise ConfigError(f"{self.name}: agreement is one of {', '.join(AGREEMENTS)}, not {self.agreement!r}.")

    @property
    def route(self) -> str:
        return self.agreement


@dataclass(frozen=True)
class Message:
    """What a coder sends: first a part whose length all workers know, then one whose length the first one tells."""

    fixed: Tensor  # [bytes] uint8
    variable: Tensor  # [bytes] uint8


class Coder(Compressor):
    """Writes the vector in few bits."""

    @abstractmethod
    def encode(self, step: Step) -> Message:
        """Add the gradient to the residual and write it."""

    @abstractmethod
    def variable_size(self, fixed: Tensor, layout: Layout) -> int:
        """Bytes that follow a fixed part."""

    @abstractmethod
    def decode(self, fixed: Tensor, variable: Tensor, layout: Layout) -> Tensor:
        """What a worker's message says: [elements] float32. The residual keeps what it does not say."""


def count(density: float, elements: int) -> int:
    """k = floor(d G), and at least one element of a vector that has any."""
    return min(max(int(density * elements), 1), elements)


def first_threshold(density: float, elements: int) -> float:
    """1 / (2 sqrt k), where nothing better is known; everything passes when everything is asked for."""
    return 0.5 / max(count(density, elements), 1) ** 0.5 if density < 1 else 0.0


def require_positive(name: str, key: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name}: {key} is {value:g}; it must be above 0.")
