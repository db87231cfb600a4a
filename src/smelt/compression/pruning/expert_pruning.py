"""Base class of expert pruning: observe the routing, score the experts, choose under a budget, remove them.

A method supplies the scores, and may change the experts that stay (merging). The base class supplies the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smelt.compression.base import CalibrationSize, Method, MethodContext, ResourceEstimate, UndecidedWidth, one_of
from smelt.compression.budget import Budget
from smelt.compression.calibration.block_inputs import capture_block_inputs
from smelt.compression.calibration.expert_statistics import ExpertStatistics, observe_experts
from smelt.errors import BudgetError, ModelError, RecipeError
from smelt.measure.cost import block_parameters, count_parameters
from smelt.models.anatomy import Anatomy, Mixture
from smelt.models.expert_surgery import check_removable, keep_experts
from smelt.models.families import GUIDE
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers

FREE, UNIFORM = "free", "uniform"  # experts per layer


@dataclass(frozen=True)
class ExpertPruning(Method):
    """Remove whole experts of a mixture with their router rows until a budget is met."""

    budget: Budget = field(metadata={"example": "budget: {parameters: 0.5}"})
    experts_per_layer: str = FREE  # free, or uniform: the same number in every layer, as other programs need

    def __post_init__(self) -> None:
        one_of(self.name, "experts_per_layer", self.experts_per_layer, (FREE, UNIFORM))
        if self.budget.measure != "parameters":
            raise RecipeError(
                f"{self.name} removes experts, and a token still uses as many as before, so a budget of "
                f"{self.budget.measure} has no effect; give one of parameters."
            )

    @abstractmethod
    def scores(self, anatomy: Anatomy, statistics: Sequence[ExpertStatistics], seed: int) -> list[np.ndarray]:
        """Return the importance of each expert, one vector per mixture; comparable between mixtures."""

    def prepare_kept(self, mixture: Mixture, kept: np.ndarray, statistics: ExpertStatistics) -> dict[str, Any]:
        """Change the experts that stay, before the others are removed; return facts."""
        return {}

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        anatomy = model.anatomy
        self.check(anatomy)
        before = block_parameters(anatomy)
        statistics = self.observe(anatomy, context) if self.uses_data else []
        scores = self.scores(anatomy, statistics, context.seed)
        choice = self.choose(anatomy, scores)
        facts: dict[str, Any] = {}
        for position, (mixture, kept) in enumerate(zip(anatomy.mixtures, choice, strict=True)):
            if statistics:
                facts |= self.prepare_kept(mixture, kept, statistics[position])
            keep_experts(model.network, mixture, kept.tolist())
        removed = before - block_parameters(model.anatomy)
        if removed <= 0 and self.budget.keep < 1:
            raise BudgetError(f"{self.name} removed nothing under the budget {self.budget.to_json()}.")
        return {
            "parameters_removed": removed,
            "block_parameters_before": before,
            "experts": {
                mixture.path: f"{mixture.num_experts} of {mixture.original_experts}"
                for mixture in model.anatomy.mixtures
            },
            **facts,
        }

    def observe(self, anatomy: Anatomy, context: MethodContext) -> list[ExpertStatistics]:
        """Run the calibration data through the network once, block by block; return the statistics of each mixture."""
        block_inputs = capture_block_inputs(anatomy, context.batches, limit=context.memory_limit, folder=context.folder)
        statistics, mixtures = [], iter(anatomy.mixtures)
        for block in context.progress.track(anatomy.blocks, self.name):
            observed = observe_experts(block_inputs, block)
            if observed is not None:
                _check_routing(next(mixtures), observed)
                statistics.append(observed)
        return statistics

    def choose(self, anatomy: Anatomy, scores: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the positions of the experts to keep in each mixture, ascending."""
        costs = [expert_parameters(mixture) for mixture in anatomy.mixtures]
        counts = [mixture.num_experts for mixture in anatomy.mixtures]
        least = [mixture.top_k for mixture in anatomy.mixtures]
        total = block_parameters(anatomy)
        allowed = self.budget.keep * total
        smallest = total - sum(cost * (n - k) for cost, n, k in zip(costs, counts, least, strict=True))
        if smallest > allowed:
            raise BudgetError(
                f"the budget cannot be met: with no more experts than a token uses in every layer, "
                f"{100 * smallest / total:.0f} % of the parameters in the blocks remain; allow more."
            )
        select = _select_uniform if self.experts_per_layer == UNIFORM else _select_free
        return select(scores, costs, least, total - allowed)

    @property
    def keeps_plain_shape(self) -> bool:
        return self.experts_per_layer == UNIFORM

    def targets(self) -> dict[str, float]:
        return self.budget.to_json()

    def check(self, anatomy: Anatomy) -> None:
        if quantized_layers(anatomy.network):
            raise ModelError("this model is already quantized; prune its source model, then quantize the result.")
        if not anatomy.mixtures:
            raise ModelError(
                f"{self.name} removes experts, and this {anatomy.family.name} network has no mixture of experts that "
                f"Smelt knows; prune heads and channels instead (fisher, flap), or describe its family ({GUIDE})."
            )
        for mixture in anatomy.mixtures:
            check_removable(anatomy.network, mixture)

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        """Remove as many experts as the budget asks for; which ones does not matter to the shape."""
        choice = self.choose(anatomy, [np.arange(mixture.num_experts, 0.0, -1) for mixture in anatomy.mixtures])
        for mixture, kept in zip(anatomy.mixtures, choice, strict=True):
            keep_experts(anatomy.network, mixture, kept.tolist())
        return undecided

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        if not self.uses_data:
            return ResourceEstimate()
        hidden = 4 * size.tokens * anatomy.hidden_size
        return ResourceEstimate(1.0, hidden if memory_limit is None else min(hidden, memory_limit))


def expert_parameters(mixture: Mixture) -> float:
    """Count the parameters that leave with one expert of a mixture on average, with its router row."""
    rows = sum(parameter.numel() for parameter in mixture.router.parameters())
    return (sum(count_parameters(expert) for expert in mixture.module) + rows) / mixture.num_experts


def share_of_mixture(values: np.ndarray) -> np.ndarray:
    """Scale the scores of a mixture to a mean of 1: raw ones grow with the residual stream from layer to layer."""
    mean = values.mean()
    scaled: np.ndarray = values / mean if mean > 0 else values
    return scaled


def _select_uniform(
    scores: Sequence[np.ndarray], costs: Sequence[float], least: Sequence[int], excess: float
) -> list[np.ndarray]:
    """Keep the best experts of every mixture, as many in each; mixtures that have fewer already keep theirs."""
    counts = [len(values) for values in scores]
    for count in range(max(counts), min(least) - 1, -1):
        kept = [max(min(count, n), k) for n, k in zip(counts, least, strict=True)]
        if sum(cost * (n - keep) for cost, n, keep in zip(costs, counts, kept, strict=True)) >= excess - 1e-6:
            break
    return [np.sort(np.argsort(-values, kind="stable")[:keep]) for values, keep in zip(scores, kept, strict=True)]


def _select_free(
    scores: Sequence[np.ndarray], costs: Sequence[float], least: Sequence[int], excess: float
) -> list[np.ndarray]:
    """Remove the experts with the lowest scores of the whole network until the rest fits."""
    owners = np.concatenate([np.full(len(values), i) for i, values in enumerate(scores)])
    positions = np.concatenate([np.arange(len(values)) for values in scores])
    keep = [np.ones(len(values), dtype=bool) for values in scores]
    for item in np.argsort(np.concatenate(list(scores)), kind="stable"):
        if excess <= 1e-6:
            break
        mask = keep[owners[item]]
        if mask.sum() > least[owners[item]]:
            mask[positions[item]] = False
            excess -= costs[owners[item]]
    return [np.flatnonzero(mask) for mask in keep]


def _check_routing(mixture: Mixture, statistics: ExpertStatistics) -> None:
    """Raise if the data says nothing about most experts, because the router never chooses them."""
    used = int((statistics.tokens > 0).sum())
    if used > mixture.top_k or mixture.num_experts == mixture.top_k:
        return
    whom = "one expert" if used == 1 else f"the same {used} experts"
    raise ModelError(
        f"the router at {mixture.router_path} sends every calibration token to {whom} of {mixture.num_experts}, so the "
        "others cannot be scored; give calibration data like what the model will serve, or check that its router "
        "is trained."
    )
