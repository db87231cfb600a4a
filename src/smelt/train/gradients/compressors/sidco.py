"""SIDCo: a threshold read from a distribution that is fitted to the magnitudes, refined by fitting the tail again."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kernels.threshold_select import threshold_select
from smelt.train.gradients.compressor import Chosen, Independent, State, Step
from smelt.train.gradients.layout import Layout

_FIRST = 0.25  # share that the first of several stages keeps
_PERIOD = 5  # steps between decisions about the number of stages
_FEWEST = 100  # survivors that a tail can be fitted to


@dataclass(frozen=True)
class SIDCo(Independent):
    """Exponential: thr = -mean ln d. Generalised Pareto, from mean m and variance v: a = m (m^2/v + 1) / 2,
    c = (m^2/v - 1) / 2, thr = a (1 - d^c) / c. With S stages the first keeps a quarter, the others equal shares of what
    is left; every 5 steps S falls if more than 1.2 times the target was selected and grows if less than 0.8 times.

    Of the paper's third variant, a gamma first stage, the formula is not known here."""

    name: ClassVar[str] = "sidco"
    paper: ClassVar[str] = (
        "Abdelmoniem et al., An Efficient Statistical-based Gradient Compression Technique for Distributed Training "
        "Systems, MLSys 2021"
    )
    carried: ClassVar[tuple[str, ...]] = ("stages",)

    distribution: str = "exponential"  # or "pareto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distribution not in ("exponential", "pareto"):
            raise ConfigError(f"sidco: distribution is one of exponential, pareto, not {self.distribution!r}.")

    def start(self, layout: Layout, workers: int) -> State:
        return {"stages": torch.tensor(1), "ratios": torch.tensor(0.0, dtype=torch.float64)}

    def choose(self, step: Step) -> Chosen:
        memory = step.add()
        threshold = self.threshold(memory, int(step.state["stages"]))
        found = threshold_select(memory, threshold, 0, len(memory), step.slots)
        self._control(step, int((found < len(memory)).sum()))
        return Chosen(found)

    def threshold(self, memory: Tensor, stages: int) -> float:
        """Of |memory| itself; dividing by its norm first, as the paper does, changes nothing but the unit."""
        tail, floor, threshold = memory.abs(), 0.0, 0.0
        rest = (self.density / _FIRST) ** (1 / (stages - 1)) if stages > 1 else 1.0
        shares = [self.density] if stages == 1 or self.density >= _FIRST else [_FIRST] + [rest] * (stages - 1)
        for stage, share in enumerate(shares):
            if stage:
                tail = tail[tail >= threshold]
                if len(tail) < _FEWEST:
                    break
                floor = float(tail.min())
            threshold = floor + self._quantile(tail - floor, share)
        return threshold

    def _quantile(self, excess: Tensor, share: float) -> float:
        """What a share of the fitted distribution exceeds."""
        if not len(excess):
            return 0.0
        mean = float(excess.mean())
        if self.distribution == "exponential":
            return -mean * log(share)
        ratio = mean**2 / max(float(excess.var(correction=0)), 1e-38)
        scale, shape = 0.5 * mean * (ratio + 1), 0.5 * (ratio - 1)
        return -scale * log(share) if abs(shape) < 1e-6 else scale * (1 - share**shape) / shape

    def _control(self, step: Step, found: int) -> None:
        step.state["ratios"] = step.state["ratios"] + found / self.target(len(step.memory))
        if step.number % _PERIOD == _PERIOD - 1:
            ratio = float(step.state["ratios"]) / _PERIOD
            change = -1 if ratio > 1.2 else 1 if ratio < 0.8 else 0
            most = max(1, ceil(log(self.density) / log(0.5)))
            step.state["stages"] = (step.state["stages"] + change).clamp(1, most)
            step.state["ratios"] = torch.tensor(0.0, dtype=torch.float64)
