"""The frame that every structured pruning method stands in: observe, score, choose under a budget, cut, repair.

A method brings its scores. The frame brings prices, the search, the repair of what is left, surgery, and the facts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from smelt.compression.allocation.latency_search import choose_under_latency
from smelt.compression.allocation.unit_search import Candidates, Choice, search, search_threshold, search_uniform
from smelt.compression.base import CalibrationSize, Method, MethodContext, ResourceEstimate, one_of, within
from smelt.compression.budget import Budget
from smelt.compression.pruning.repair import STREAMS, RepairSettings, cut, cut_and_repair
from smelt.config import renamed
from smelt.errors import BudgetError, ModelError, RecipeError
from smelt.measure.cost import CostMetric, Workload, block_cost, block_parameters, cost_with_units, unit_costs
from smelt.models.anatomy import Anatomy, Part
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers

HALVINGS = 30  # of the budget, where prices are not exact
MATRICES = 5  # float64 matrices of a part's width that live at once in a solve

Scores = list[np.ndarray]
SPREADS: dict[str, Callable[[Sequence[Candidates], float], Choice]] = {
    "global": search,
    "uniform": search_uniform,
    "threshold": search_threshold,
}


@dataclass(frozen=True)
class StructuredPruning(Method):
    """Remove whole heads, filters and channels until a budget is met."""

    budget: Budget = field(metadata={"example": "budget: {parameters: 0.8}"})
    seq_len: int | None = renamed("tokens", default=None)  # for MACs and latency; null: the mean of the data
    max_sparsity: float | None = renamed("cap", default=None)  # per layer; null: 1 in encoders, 0.5 in decoders
    ffn_multiple: int = renamed("multiple", default=1)  # keep FFN channels in multiples of this
    head_multiple: int = 1  # keep heads (or KV groups) in multiples of this
    repair: str = renamed("finish", default="none")  # none, tune (one scale per unit) or full (refit the projection)
    solver: str = "lsmr"  # of tune: lsmr (as published) or ridge (damping relative to the Gram matrix)
    damping: float = 0.1  # of ridge and full, relative to the mean of the Gram diagonal
    intercept: bool = True  # of full: also fit a bias

    spread: ClassVar[str] = "global"
    repairs: ClassVar[tuple[str, ...]] = ("none", "tune", "full")

    def __post_init__(self) -> None:
        one_of(self.name, "repair", self.repair, self.repairs)
        one_of(self.name, "solver", self.solver, ("lsmr", "ridge"))
        within(self.name, "ffn_multiple", self.ffn_multiple, 1, 4096)
        within(self.name, "head_multiple", self.head_multiple, 1, 1024)
        within(self.name, "damping", self.damping, 1e-8, 1e3)
        if self.max_sparsity is not None:
            within(self.name, "max_sparsity", self.max_sparsity, 0.0, 1.0)
        if self.seq_len is not None:
            within(self.name, "seq_len", self.seq_len, 1, 1_000_000)
        if self.budget.measure == "latency" and self.spread != "global":
            raise RecipeError(f"{self.name} cannot search under a latency budget; fisher can.")

    def observe(self, anatomy: Anatomy, context: MethodContext) -> Any:
        """What the method must see of the model before it can score: gradients, moments, or nothing."""
        return None

    @abstractmethod
    def scores(self, anatomy: Anatomy, seen: Any, context: MethodContext) -> Scores:
        """How much each unit matters, a vector for every part."""

    def refine(self, anatomy: Anatomy, choice: Choice, seen: Any) -> Choice:
        """A second look at which units stay, the number in each part given."""
        return choice

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        anatomy = model.anatomy
        if quantized_layers(model.network):
            raise ModelError("this model is quantised already; prune the model it was made from, then quantise that.")
        self._check_repair(anatomy)
        before = block_parameters(anatomy)
        seen = self.observe(anatomy, context)
        scores = self.scores(anatomy, seen, context)
        choice = kept_choice(
            context, "choice", lambda: self.refine(anatomy, self.choose(anatomy, scores, context, self.budget), seen)
        )
        facts = self.prune(model, choice, scores, seen, context)
        removed = before - block_parameters(model.anatomy)
        if removed <= 0 and self.budget.keep < 1:
            raise BudgetError(f"{self.name} removed nothing under the budget {self.budget.to_json()}.")
        return {"parameters_removed": removed, "block_parameters_before": before, **facts}

    @property
    def uses_data(self) -> bool:
        return super().uses_data or self.repair != "none"

    def targets(self) -> dict[str, float]:
        return self.budget.to_json()

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        """Of the repair: teacher and student pass through every block; one part's equations live at a time."""
        if self.repair not in ("tune", "full"):
            return ResourceEstimate(1.0 if "calibration data" in self.needs else 0.0)
        widest = max(part.output.in_features for part in anatomy.parts)
        streams = STREAMS * 4 * size.tokens * anatomy.parts[0].output.out_features
        held = streams if memory_limit is None else min(streams, memory_limit)
        return ResourceEstimate(passes=3.5, memory=held + MATRICES * 8 * widest * widest)

    def choose(self, anatomy: Anatomy, scores: Scores, context: MethodContext, budget: Budget) -> Choice:
        """The units to keep under a budget."""
        if budget.keep == 1:
            return [np.arange(part.units) for part in anatomy.parts]
        workload = self.workload(anatomy, context)
        if budget.measure == "latency":
            candidates = self.candidates(anatomy, scores, [0.0] * len(scores))
            return choose_under_latency(anatomy, candidates, budget.keep, workload, context.seed)
        measure: Any = budget.measure
        candidates = self.candidates(anatomy, scores, unit_costs(anatomy, measure, workload))
        allowed = budget.keep * block_cost(anatomy, measure, workload) - self.added_cost(anatomy, measure)
        return fitting_choice(anatomy, candidates, SPREADS[self.spread], allowed, measure, workload)

    def added_cost(self, anatomy: Anatomy, measure: str) -> float:
        """What a repair adds: a bias where there was none."""
        if measure not in ("parameters", "bytes") or not self.adds_bias:
            return 0.0
        outputs = [part.output for part in anatomy.parts if part.output.bias is None]
        size = outputs[0].weight.element_size() if outputs and measure == "bytes" else 1
        return float(size * sum(output.out_features for output in outputs))

    @property
    def adds_bias(self) -> bool:
        return self.repair == "full" and self.intercept

    def candidates(self, anatomy: Anatomy, scores: Scores, prices: Sequence[float]) -> list[Candidates]:
        """Units as the search sees them, with the floors that protect a network from losing too much in one place."""
        return [
            Candidates(
                kind=part.kind,
                importance=np.asarray(score, dtype=np.float64),
                price=price,
                floor=self.floor(anatomy, part),
                multiple=self.head_multiple if part.kind == "heads" else self.ffn_multiple,
            )
            for part, score, price in zip(anatomy.parts, scores, prices, strict=True)
        ]

    def floor(self, anatomy: Anatomy, part: Part) -> int:
        """Return the minimum number of units to keep.

        That is what `max_sparsity` leaves; at least one channel, and one unit in the first two and the last block of a
        decoder; all units of a part that cannot be pruned.
        """
        if part.fixed:
            return part.units
        causal = anatomy.family.causal
        cap = self.max_sparsity if self.max_sparsity is not None else (0.5 if causal else 1.0)
        least = part.units - int(np.floor(part.units * cap + 1e-9))
        ends = causal and part.block in (0, 1, len(anatomy.blocks) - 1)
        return max(least, 1 if part.kind == "channels" or ends else 0)

    def workload(self, anatomy: Anatomy, context: MethodContext) -> Workload:
        size = getattr(anatomy.network.config, "image_size", 224)
        image_size = size if isinstance(size, int) else 224
        return Workload(tokens=self.seq_len or max(1, round(context.mean_tokens)), image_size=image_size)

    def prune(self, model: Model, choice: Choice, scores: Scores, seen: Any, context: MethodContext) -> dict[str, Any]:
        """Cut to the choice and repair what is left."""
        if self.repair == "none":
            cut(model.network, choice)
            return {}
        return cut_and_repair(model, choice, self.repair_settings(model), context)

    def repair_settings(self, model: Model) -> RepairSettings:
        causal = model.anatomy.family.causal
        return RepairSettings(
            kind=self.repair,
            solver=self.solver,
            damping=self.damping,
            intercept=self.intercept,
            skip_first_token=causal,
        )

    def _check_repair(self, anatomy: Anatomy) -> None:
        if self.repair != "none" and any(part.kind == "channels" for part in anatomy.parts):
            raise RecipeError(
                f"repair: {self.repair} is for attention and feed-forward parts; for convolutions use repair: none."
            )
        if self.repair in ("tune", "full") and any(part.mixture is not None for part in anatomy.parts):
            raise RecipeError(
                f"repair: {self.repair} fits one feed-forward a block to a teacher; for a mixture of experts use "
                "repair: none."
            )


Rule = Callable[[Sequence[Candidates], float], Choice]


def fitting_choice(
    anatomy: Anatomy,
    candidates: Sequence[Candidates],
    rule: Rule,
    allowed: float,
    measure: CostMetric,
    workload: Workload,
) -> Choice:
    """The largest choice by a rule whose true cost is allowed. Prices a unit are exact but for convolutions, which
    neighbouring parts share: there the rule's own budget is narrowed until the truth fits."""
    everything = [part.units for part in anatomy.parts]
    units = sum(part.price * len(part.importance) for part in candidates)
    fixed = cost_with_units(anatomy, everything, measure, workload) - units

    def true_cost(choice: Choice) -> float:
        return cost_with_units(anatomy, [len(kept) for kept in choice], measure, workload)

    if all(part.kind != "channels" for part in anatomy.parts):
        return rule(candidates, allowed - fixed)
    best, low, high = None, 0.0, units
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        try:
            choice = rule(candidates, middle)
        except BudgetError:
            low = middle
            continue
        if true_cost(choice) <= allowed:
            best, low = choice, middle
        else:
            high = middle
    if best is None:
        raise BudgetError(f"the budget cannot be met: {measure} stay above it with one channel a layer; allow more.")
    return best


def kept_choice(context: MethodContext, name: str, choose: Callable[[], Choice]) -> Choice:
    """A choice once made is kept: what was measured for it may come out differently in a resumed run."""
    done = context.checkpoint.load(name)
    if done is None:
        choice = choose()
        context.checkpoint.save(name, {f"{i:05d}": torch.from_numpy(kept) for i, kept in enumerate(choice)})
        return choice
    return [done[key].numpy() for key in sorted(done)]
