"""SAGE: one threshold per rank, adjusted every step by three cheap factors that keep the density near its target."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import ClassVar

import torch

from smelt.config import renamed
from smelt.kernels.threshold_select import threshold_select
from smelt.train.gradients.compressor import (
    COMPRESSORS,
    CompressionStep,
    CompressorState,
    IndependentSparsifier,
    SelectedIndices,
    initial_threshold,
    require_positive,
)
from smelt.train.gradients.layout import BucketLayout

_SLOVIN = 0.05  # error of the sample's size: G / (1 + G 0.05^2) elements, 400 of a long bucket


@COMPRESSORS.register(
    "sage",
    paper=(
        "Yoon, Jeong and Oh, SAGE: toward on-the-fly gradient compression ratio scaling, The Journal of "
        "Supercomputing, 2023"
    ),
)
@dataclass(frozen=True)
class SAGE(IndependentSparsifier):
    """A threshold that follows the scale of gradients, for runs in which the scale changes fast.

    delta <- delta alpha beta gamma: alpha, the growth of the mean |residual| of a sample, here within [0.5, 2]; beta =
    2 / (1 + exp(d - d')) with d' the share above delta alpha; gamma = 0.95 or 1.05 where d' is ten times off. The
    density is that of one rank; n ranks send up to n times as much."""

    portable_state: ClassVar[tuple[str, ...]] = ("threshold", "mean")

    exchange_mode: str = renamed("agreement", default="own")
    threshold: float | None = None  # the first one; None: 1 / (2 sqrt k)
    seed: int = 0  # of the samples

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            require_positive(self.name, "threshold", self.threshold)

    def init_state(self, layout: BucketLayout, world_size: int) -> CompressorState:
        first = self.threshold or initial_threshold(self.density, layout.numel)
        return {"threshold": torch.tensor(first, dtype=torch.float64), "mean": torch.tensor(torch.nan)}

    def select(self, step: CompressionStep) -> SelectedIndices:
        accumulated = step.accumulate()
        numel = len(accumulated)
        size = int(numel / (1 + numel * _SLOVIN**2))
        generator = step.generator(self.seed, per_rank=True)
        sample = torch.randint(max(numel, 1), (size,), generator=generator, device=accumulated.device)
        mean = accumulated[sample].abs().mean().cpu()
        if not step.state["mean"].isnan():
            step.state["threshold"] = step.state["threshold"] * self._factor(step, float(mean))
        step.state["mean"] = mean
        return SelectedIndices(threshold_select(accumulated, float(step.state["threshold"]), 0, numel, step.capacity))

    def _factor(self, step: CompressionStep, mean: float) -> float:
        before = float(step.state["mean"])
        alpha = min(max(mean / before, 0.5), 2.0) if before > 0 else 1.0
        above = step.residual.abs() >= float(step.state["threshold"]) * alpha
        density = float(above.sum()) / len(step.residual)
        beta = 2 / (1 + exp(self.density - density))
        ratio = density / self.density
        gamma = 0.95 if ratio < 0.1 else 1.05 if ratio > 10 else 1.0
        return alpha * beta * gamma
