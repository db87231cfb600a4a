"""NCE: widths for uniform low precision that may grow beyond the original ones (Park et al., 2022).

A part has logits over candidate widths. A pass draws two candidates by a Gumbel softmax (TAS, Dong and Yang, 2019); the
weights of the network learn on one half of the data, and the logits on the other half, by

    loss + cost_weight * (penalty of MACs + penalty of parameters), where the penalty of a measure is
    log(E[cost] / budget) if the most probable network exceeds its budget, -log(E[cost] / budget) if it falls short of
    both budgets by more than `tolerance`, and 0 otherwise.

Where the largest candidate is more probable than `threshold`, an epoch ends with a larger candidate, as likely as that
one. With a threshold of 1 nothing grows, as in TAS.

The paper's threshold and step of expansion are not published; those here are ours. So are three details: the channels
of a part are sorted before the search, so that narrow candidates start with those that contribute most; a penalty asks
for more of a measure only while neither budget binds; and what still exceeds the budgets at the end is narrowed, or
widened if it falls short of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from smelt.compression.base import METHODS, within
from smelt.compression.channel_search.base import ChannelSearch, ChannelSearchRun
from smelt.errors import RecipeError

SAMPLED = 2  # candidates of a part that a pass computes
_ROUNDING = 1e-6  # of products that are whole numbers


@METHODS.register(
    "nce",
    paper="Park et al., Automatic Network Adaptation for Ultra-Low Uniform-Precision Quantization, 2022 "
    "(NCE, arXiv 2212.10878)",
    needs=("calibration data", "labels"),
)
@dataclass(frozen=True)
class Nce(ChannelSearch):
    """Use before `qat` of a ResNet at 2 bits: layers sensitive to low precision get more channels, others fewer.

    All layers keep the same number of bits, and MACs and parameters their budgets.
    """

    choices: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the channels before the search
    threshold: float = 0.15  # probability of the largest candidate above which a larger one is added; 1: never
    step: float = 0.125  # by which a larger candidate is wider, of the channels before the search
    max_width: float = 2.0  # of the channels before the search, that candidates may grow to
    expand_until: float = 0.75  # fraction of the search after which nothing is added
    initial_temperature: float = 5.0  # of the Gumbel softmax
    final_temperature: float = 0.1  # it falls to this as a cosine
    cost_weight: float = 2.0  # of the penalties of MACs and parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.choices or not all(0 < choice <= 1 for choice in self.choices) or max(self.choices) < 1:
            raise RecipeError(f"choices of {self.name} must be fractions above 0, of which the largest is 1.")
        within(self.name, "threshold", self.threshold, 0.0, 1.0)
        within(self.name, "step", self.step, 0.01, 1.0)
        within(self.name, "max_width", self.max_width, 1.0, 8.0)
        within(self.name, "expand_until", self.expand_until, 0.0, 1.0)
        within(self.name, "initial_temperature", self.initial_temperature, 0.01, 100.0)
        within(self.name, "final_temperature", self.final_temperature, 0.01, 100.0)
        within(self.name, "cost_weight", self.cost_weight, 0.0, 1000.0)

    def candidates(self, units: int) -> tuple[list[int], list[int]]:
        multiple, most = self.channel_multiple, self.max_width * units + _ROUNDING
        initial = {max(round(choice * units / multiple), 1) * multiple for choice in self.choices}
        steps = int((self.max_width - 1) / self.step + _ROUNDING) if self.threshold < 1 else 0
        wanted = (units * (1 + number * self.step) for number in range(1, steps + 1))
        larger = {math.ceil(width / multiple - _ROUNDING) * multiple for width in wanted}
        return sorted(initial), sorted(width for width in larger - initial if width <= most)

    def temperature(self, progress: float) -> float:
        """Return the temperature of the Gumbel softmax after a fraction of the search."""
        span = self.initial_temperature - self.final_temperature
        return self.final_temperature + span * (1 + math.cos(math.pi * progress)) / 2

    def sample(self, run: ChannelSearchRun, step: int) -> None:
        progress = step / (2 * run.steps_per_epoch * self.epochs)  # two passes a step
        run.supernet.sample(self.temperature(progress), SAMPLED, run.generator(step))

    def width_loss(self, run: ChannelSearchRun, loss: Tensor) -> Tensor:
        best = [choice.best for choice in run.choices]
        is_small = run.is_small(best)
        for measure, keep in self.budgets.items():
            is_large = run.share(measure, best) > keep
            if is_large or is_small:
                penalty = (run.expected_share(measure) / keep).log()
                loss = loss + self.cost_weight * (penalty if is_large else -penalty)
        return loss

    def expand(self, run: ChannelSearchRun, epoch: int) -> list[str]:
        expanded: list[str] = []
        if epoch + 1 > self.expand_until * self.epochs:
            return expanded
        for choice in run.choices:
            can_grow = choice.count < len(choice.candidates)
            if can_grow and float(choice.probabilities[-1].detach()) > self.threshold:
                choice.expand()
                expanded.append(choice.name)
        return expanded
