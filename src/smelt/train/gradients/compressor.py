"""The contract of a gradient compressor: a frozen dataclass of checked parameters and a state of plain tensors.

A compressor holds no data of a run. What it must remember between steps lies in the `CompressorState` that it is
passed, so that a checkpoint can save it; gradients that were not sent yet lie in the residual, which belongs to
`reducer.py`. There are two kinds. A `Sparsifier` selects elements; the reducer exchanges the indices with the other
ranks, sends the values and clears the residual there. A `GradientEncoder` encodes all elements at low precision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.config import renamed
from smelt.errors import ConfigError
from smelt.kernels.threshold_select import add_and_select, threshold_select
from smelt.registry import Registry
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.gradient_views import BucketGradient, GradientViews, flatten_gradient
from smelt.train.gradients.layout import BucketLayout

CompressorState = dict[str, Tensor]  # elementwise tensors have the bucket's length; all others are small and on CPU

EXCHANGE_MODES = ("union", "own")  # of sparsifiers whose ranks select independently


@dataclass
class CompressionStep:
    """One bucket in one training step, as a compressor sees it."""

    iteration: int  # steps of this bucket before this one
    gradient: BucketGradient  # to be added to the residual
    residual: Tensor  # [numel] float32; includes the gradient after `accumulate`
    layout: BucketLayout
    comm: Comm
    state: CompressorState
    counts: list[int]  # how many elements each rank selected in the previous step; empty in the first
    capacity: int | None = None  # length that every selection is padded or cut to; None: any length
    accumulated: bool = False

    @property
    def flat_gradient(self) -> Tensor:
        """[numel] float32"""
        return flatten_gradient(self.gradient)

    def accumulate(self) -> Tensor:
        """Add the gradient to the residual, in place and once, and return the sum: what may be sent."""
        if not self.accumulated:
            self.accumulated = True
            if isinstance(self.gradient, GradientViews):
                self.gradient.add_to(self.residual)
            else:
                self.residual.add_(self.gradient)
        return self.residual

    def accumulated_at(self, indices: Tensor) -> Tensor:
        """Return residual plus gradient at some indices."""
        if self.accumulated or isinstance(self.gradient, GradientViews):
            return self.accumulate()[indices]
        return self.residual[indices] + self.gradient[indices]

    def select_above(self, threshold: float, start: int, stop: int) -> Tensor:
        """Accumulate, and return ascending indices in [start, stop) where the magnitude reaches the threshold."""
        if self.accumulated or isinstance(self.gradient, GradientViews):
            return threshold_select(self.accumulate(), threshold, start, stop, self.capacity)
        self.accumulated = True
        return add_and_select(self.residual, self.gradient, threshold, start, stop, self.capacity)

    def generator(self, seed: int, *, per_rank: bool) -> torch.Generator:
        """Return a generator seeded by the step and, if `per_rank`, the rank, so that nothing needs to be saved."""
        stream = self.comm.rank + 1 if per_rank else 0
        generator = torch.Generator(device=self.residual.device)
        return generator.manual_seed(((seed * 1_000_003 + self.iteration) * 4_099 + stream) % 2**63)


@dataclass(frozen=True)
class Compressor(ABC):
    """A gradient compression method; its fields are its parameters."""

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]  # when to use it
    portable_state: ClassVar[tuple[str, ...]] = ()  # small state that stays valid when the world size changes

    @abstractmethod
    def target_count(self, numel: int) -> float:
        """Return how many elements of a bucket should be sent."""

    def init_state(self, layout: BucketLayout, world_size: int) -> CompressorState:
        """Return the state before the first step."""
        return {}

    def correct_gradient(self, step: CompressionStep) -> BucketGradient:
        """Return what this step adds to the residual: the gradient unless a method corrects it (momentum)."""
        return step.gradient

    def check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:  # noqa: B027 - optional
        """Raise ConfigError if the optimizer that gets the reduced gradients does not fit the method.

        None: the optimizer is not known, so a method that depends on it warns.
        """

    @property
    def uses_error_feedback(self) -> bool:
        """Whether elements that were not sent are kept for the next step."""
        return True


COMPRESSORS: Registry[Compressor] = Registry("gradient compressor", key="method")


@dataclass(frozen=True)
class SelectedIndices:
    """The elements that one rank wants to send."""

    indices: Tensor  # [count] int64, ascending
    dense: Tensor | None = None  # [count] int64: sent by all ranks in addition, the same on each, not in `indices`


@dataclass(frozen=True)
class Sparsifier(Compressor):
    """Select elements to send; `density` is the target share of all elements."""

    density: float = 0.001  # above 0 and at most 1

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(
                f"{self.name}: density is {self.density:g}; it is the share of gradients that is sent, above 0 and "
                "at most 1."
            )

    @property
    @abstractmethod
    def exchange_mode(self) -> str:
        """How the ranks arrive at the indices to send.

        "exclusive": ranks select in ranges that do not overlap; all ranks send the values at all selected indices.
        "union": ranks select anywhere; all ranks send the values at all selected indices.
        "own": each rank sends (index, value) pairs of its own selection.
        "leader": all ranks send the values at the indices that rank `iteration % world_size` selected.
        "known": all ranks select the same indices without communication.
        """

    @abstractmethod
    def select(self, step: CompressionStep) -> SelectedIndices:
        """Accumulate the gradient and select elements; called on every rank in every step."""

    def on_sent(self, step: CompressionStep, sent: Tensor) -> None:
        """Update the state after this rank sent the elements at `sent`, [count] int64."""

    def target_count(self, numel: int) -> float:
        return topk_count(self.density, numel)


@dataclass(frozen=True)
class IndependentSparsifier(Sparsifier):
    """A sparsifier whose ranks select anywhere, independently of each other."""

    # "union": all ranks send the values at every selected index; "own": each sends its own (index, value) pairs
    exchange_mode: str = renamed("agreement", default="union")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange_mode not in EXCHANGE_MODES:
            options = ", ".join(EXCHANGE_MODES)
            raise ConfigError(f"{self.name}: exchange_mode is one of {options}, not {self.exchange_mode!r}.")


@dataclass(frozen=True)
class EncodedGradient:
    """What a rank sends: a part whose size all ranks know, then one whose size follows from the first."""

    fixed: Tensor  # [bytes] uint8
    variable: Tensor  # [bytes] uint8


class GradientEncoder(Compressor):
    """Encode every element of the bucket at low precision."""

    @abstractmethod
    def encode(self, step: CompressionStep) -> EncodedGradient:
        """Accumulate the gradient and encode the sum."""

    @abstractmethod
    def variable_size(self, fixed: Tensor, layout: BucketLayout) -> int:
        """Return the bytes of the variable part that belongs to a fixed part."""

    @abstractmethod
    def decode(self, fixed: Tensor, variable: Tensor, layout: BucketLayout) -> Tensor:
        """Decode to [numel] float32. The residual keeps the difference to what was encoded."""


def topk_count(density: float, numel: int) -> int:
    """Return k = floor(d G), at least one element of a bucket that has any."""
    return min(max(int(density * numel), 1), numel)


def initial_threshold(density: float, numel: int) -> float:
    """Return 1 / (2 sqrt k), for lack of anything better; 0 at density 1, so that everything passes."""
    return 0.5 / max(topk_count(density, numel), 1) ** 0.5 if density < 1 else 0.0


def require_positive(name: str, key: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name}: {key} is {value:g}; it must be above 0.")
