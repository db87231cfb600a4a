"""PowerSGD: matrices as products of two thin ones, by a step of power iteration that starts where the last ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import Compressor


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Parameters of PyTorch's own implementation, which does the work (`low_rank.py`)."""

    name: ClassVar[str] = "powersgd"
    paper: ClassVar[str] = (
        "Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS 2019 "
        "(arXiv 1905.13727)"
    )

    rank: int = 1
    plain: int = 10  # steps at the start that send everything; at least 2
    least: float = 2.0  # a matrix is only compressed if it becomes this many times smaller
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"powersgd: rank is {self.rank}; it must be at least 1.")
        if self.plain < 2:
            raise ConfigError(f"powersgd: plain is {self.plain}; PyTorch's implementation needs at least 2 such steps.")
        if not self.least >= 1:
            raise ConfigError(f"powersgd: least is {self.least:g}; it must be at least 1.")

    def target(self, elements: int) -> float:
        return elements
