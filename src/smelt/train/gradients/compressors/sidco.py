"""SIDCo: a threshold from a distribution fitted to the magnitudes, refined by fitting the tail again."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kernels.threshold_select import threshold_select
from smelt.train.gradients.compressor import (
    COMPRESSORS,
    CompressionStep,
    CompressorState,
    IndependentSparsifier,
    SelectedIndices,
)
from smelt.train.gradients.layout import BucketLayout

_FIRST_SHARE = 0.25  # that the first of several stages keeps
_PERIOD = 5  # steps between changes of the number of stages
_MIN_TAIL = 100  # elements that a tail can be fitted to


@COMPRESSORS.register(
    "sidco",
    paper=(
        "Abdelmoniem et al., An Efficient Statistical-based Gradient Compression Technique for Distributed Training "
        "Systems, MLSys 2021"
    ),
)
@dataclass(frozen=True)
class SIDCo(IndependentSparsifier):
    """Estimate the threshold without sorting, where top-k is too slow and magnitudes are close to exponential.

    Exponential: thr = -mean ln d. Generalized Pareto, from mean m and variance v: a = m (m^2/v + 1) / 2,
    c = (m^2/v - 1) / 2, thr = a (1 - d^c) / c. With S stages the first keeps a quarter, the others equal shares of what
    is left; every 5 steps S falls if more than 1.2 times the target was selected and grows if less than 0.8 times.
    The paper's third variant, a gamma first stage, is not implemented: its formula is not known here."""

    portable_state: ClassVar[tuple[str, ...]] = ("stages",)

    distribution: str = "exponential"  # or "pareto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distribution not in ("exponential", "pareto"):
            raise ConfigError(f"sidco: distribution is one of exponential, pareto, not {self.distribution!r}.")

    def init_state(self, layout: BucketLayout, world_size: int) -> CompressorState:
        return {"stages": torch.tensor(1), "ratios": torch.tensor(0.0, dtype=torch.float64)}

    def select(self, step: CompressionStep) -> SelectedIndices:
        accumulated = step.accumulate()
        threshold = self.threshold(accumulated, int(step.state["stages"]))
        indices = threshold_select(accumulated, threshold, 0, len(accumulated), step.capacity)
        self._adjust_stages(step, int((indices < len(accumulated)).sum()))
        return SelectedIndices(indices)

    def threshold(self, values: Tensor, stages: int) -> float:
        """Fit |values|; dividing by the norm first, as the paper does, changes nothing but the unit."""
        tail, floor, threshold = values.abs(), 0.0, 0.0
        rest = (self.density / _FIRST_SHARE) ** (1 / (stages - 1)) if stages > 1 else 1.0
        single = stages == 1 or self.density >= _FIRST_SHARE
        shares = [self.density] if single else [_FIRST_SHARE] + [rest] * (stages - 1)
        for stage, share in enumerate(shares):
            if stage:
                tail = tail[tail >= threshold]
                if len(tail) < _MIN_TAIL:
                    break
                floor = float(tail.min())
            threshold = floor + self._quantile(tail - floor, share)
        return threshold

    def _quantile(self, excess: Tensor, share: float) -> float:
        """Return the value that a share of the fitted distribution exceeds."""
        if not len(excess):
            return 0.0
        mean = float(excess.mean())
        if self.distribution == "exponential":
            return -mean * log(share)
        ratio = mean**2 / max(float(excess.var(correction=0)), 1e-38)
        scale, shape = 0.5 * mean * (ratio + 1), 0.5 * (ratio - 1)
        return -scale * log(share) if abs(shape) < 1e-6 else scale * (1 - share**shape) / shape

    def _adjust_stages(self, step: CompressionStep, num_selected: int) -> None:
        step.state["ratios"] = step.state["ratios"] + num_selected / self.target_count(len(step.residual))
        if step.iteration % _PERIOD == _PERIOD - 1:
            ratio = float(step.state["ratios"]) / _PERIOD
            change = -1 if ratio > 1.2 else 1 if ratio < 0.8 else 0
            max_stages = max(1, ceil(log(self.density) / log(0.5)))
            step.state["stages"] = (step.state["stages"] + change).clamp(1, max_stages)
            step.state["ratios"] = torch.tensor(0.0, dtype=torch.float64)
