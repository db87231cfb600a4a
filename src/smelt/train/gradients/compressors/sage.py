"""SAGE: a threshold of each worker, steered every step by three cheap factors so that its density stays near target."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import ClassVar

import torch

from smelt.kernels.threshold_select import threshold_select
from smelt.train.gradients.compressor import Chosen, Independent, State, Step, first_threshold, require_positive
from smelt.train.gradients.layout import Layout

_SLOVIN = 0.05  # error of the sample's size: G / (1 + G 0.05^2) elements, 400 of a long vector


@dataclass(frozen=True)
class SAGE(Independent):
    """delta <- delta alpha beta gamma: alpha, the growth of the mean |memory| of a sample, here within [0.5, 2]; beta =
    2 / (1 + exp(d - d')) with d' the share above delta alpha; gamma = 0.95 or 1.05 where d' is ten times off.

    The density is that of one worker; of n workers up to n times as much is sent."""

    name: ClassVar[str] = "sage"
    paper: ClassVar[str] = (
        "Yoon, Jeong and Oh, SAGE: toward on-the-fly gradient compression ratio scaling, The Journal of "
        "Supercomputing, 2023"
    )
    carried: ClassVar[tuple[str, ...]] = ("threshold", "mean")

    agreement: str = "own"
    threshold: float | None = None  # the first one; None: 1 / (2 sqrt k)
    seed: int = 0  # of the samples

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            require_positive(self.name, "threshold", self.threshold)

    def start(self, layout: Layout, workers: int) -> State:
        first = self.threshold or first_threshold(self.density, layout.size)
        return {"threshold": torch.tensor(first, dtype=torch.float64), "mean": torch.tensor(torch.nan)}

    def choose(self, step: Step) -> Chosen:
        memory = step.add()
        elements = len(memory)
        size = int(elements / (1 + elements * _SLOVIN**2))
        generator = step.generator(self.seed, own=True)
        places = torch.randint(max(elements, 1), (size,), generator=generator, device=memory.device)
        mean = memory[places].abs().mean().cpu()
        if not step.state["mean"].isnan():
            step.state["threshold"] = step.state["threshold"] * self._factor(step, float(mean))
        step.state["mean"] = mean
        return Chosen(threshold_select(memory, float(step.state["threshold"]), 0, elements, step.slots))

    def _factor(self, step: Step, mean: float) -> float:
        before = float(step.state["mean"])
        alpha = min(max(mean / before, 0.5), 2.0) if before > 0 else 1.0
        above = step.memory.abs() >= float(step.state["threshold"]) * alpha
        density = float(above.sum()) / len(step.memory)
        beta = 2 / (1 + exp(self.density - density))
        ratio = density / self.density
        gamma = 0.95 if ratio < 0.1 else 1.05 if ratio > 10 else 1.0
        return alpha * beta * gamma
