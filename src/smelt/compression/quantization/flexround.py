"""FlexRound: learned rounding with one divisor per weight (Lee et al., 2023), and its low-rank form LRQ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from smelt.compression.base import METHODS, within
from smelt.compression.quantization.learned import LearnedQuantization, Quantizer
from smelt.compression.quantization.rounding import search_qparams
from smelt.config import renamed
from smelt.numerics.format import QuantParams
from smelt.numerics.integer import Integer


@METHODS.register(
    "flexround",
    paper="Lee et al., 2023 (FlexRound, arXiv 2306.00317); Lee et al., 2025 (LRQ, arXiv 2407.11534)",
    needs=("calibration data",),
)
@dataclass(frozen=True)
class FlexRound(LearnedQuantization):
    """Use at low bit widths when long calibration is affordable: it learns how to round every weight.

    The papers train on 512 samples of 1024 tokens in batches of two (`data` of the recipe).
    """

    group_size: int = -1  # weights of a row that share a scale; -1: per-channel
    lr: float = 3e-3  # of Adam, with cosine decay; the papers use 0.0025 (3 bits, 7B) and 0.0009 (LRQ)
    iterations: int = 5000  # updates per block; 0: round to nearest
    rank: int | None = None  # of the divisor matrix (LRQ; 1024 in the paper); null: full rank
    range_search: bool = renamed("search", default=False)  # start from ranges that minimize |error|^2.4

    cosine: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "iterations", self.iterations, 0, 1_000_000)
        if self.rank is not None:
            within(self.name, "rank", self.rank, 1, 65_536)

    def quantizer(self, weight: Tensor, generator: torch.Generator) -> Quantizer:
        rows, columns = weight.shape
        saves = self.rank is not None and self.rank * (rows + columns) < rows * columns
        divisors = LowRank(weight, self.rank, generator) if saves and self.rank else Full(weight)
        return Divided(weight, self.integer, divisors, self.range_search)

    def updates(self, batches: int) -> int:
        return self.iterations


class Full(nn.Module):
    """Full-rank log-divisors, one per weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(weight.shape, device=weight.device))  # [rows, columns]

    def forward(self) -> Tensor:
        return self.matrix


class LowRank(nn.Module):
    """Low-rank log-divisors L U + r + c (LRQ), which overfit the calibration data less."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        bound = 1 / math.sqrt(columns)  # Kaiming uniform, as torch initializes linear layers
        right = torch.empty(rank, columns).uniform_(-bound, bound, generator=generator)
        self.left = nn.Parameter(torch.zeros(rows, rank, device=weight.device))
        self.right = nn.Parameter(right.to(weight.device))
        self.row = nn.Parameter(torch.zeros(rows, 1, device=weight.device))
        self.column = nn.Parameter(torch.zeros(1, columns, device=weight.device))

    def forward(self) -> Tensor:
        return self.left @ self.right + self.row + self.column


class Divided(Quantizer):
    """W' = s clip(round(W / (s exp(D + d)))): s per group, D per weight, d per row; zero points are fixed."""

    zero: Tensor | None

    def __init__(self, weight: Tensor, number_format: Integer, divisors: nn.Module, search: bool) -> None:
        super().__init__(weight, number_format)
        compute = search_qparams if search else _full_range_qparams
        qparams = compute(self.grouped, number_format)
        self.register_buffer("zero", qparams.zero)
        self.step = nn.Parameter(qparams.scale.log())  # [rows, groups, 1]
        self.divisors = divisors
        self.row = nn.Parameter(torch.zeros(len(weight), 1, device=weight.device))

    def qparams(self) -> QuantParams:
        return QuantParams(self.format.round_scale(self.step.exp()), self.zero)

    def divisor(self, scale: Tensor) -> Tensor:
        return scale * self.format.split_groups(self.divisors() + self.row).exp()


def _full_range_qparams(grouped: Tensor, number_format: Integer) -> QuantParams:
    return number_format.compute_qparams(grouped)
