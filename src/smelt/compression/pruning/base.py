"""Base class of structured pruning methods: observe, score, select units under a budget, cut, repair.

A method supplies the scores; the base class supplies unit costs, the search, surgery, repair and the facts.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from smelt.compression.allocation.latency_search import search_under_latency
from smelt.compression.allocation.unit_search import (
    Candidates,
    KeptUnits,
    search,
    search_equal,
    search_threshold,
    search_uniform,
)
from smelt.compression.base import (
    CalibrationSize,
    Method,
    MethodContext,
    ResourceEstimate,
    UndecidedWidth,
    one_of,
    within,
)
from smelt.compression.budget import Budget
from smelt.compression.pruning.alignment import CHOICE as ALIGNMENT_CHOICE
from smelt.compression.pruning.alignment import MEASURED, measured_alignment
from smelt.compression.pruning.alignment import unit_multiple as aligned_units
from smelt.compression.pruning.conv_repair import cut_and_refit
from smelt.compression.pruning.repair import ACTIVATION_COPIES, RepairSettings, cut, cut_and_repair
from smelt.compression.pruning.selection import Rule, checkpointed_selection, search_true_cost
from smelt.config import renamed
from smelt.errors import BudgetError, ModelError, RecipeError
from smelt.measure.cost import Workload, block_cost, block_parameters, unit_costs
from smelt.models.anatomy import Anatomy, Part, Projection
from smelt.models.artifact import has_plain_field
from smelt.models.families import GUIDE
from smelt.models.implants import refuse_implants
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers

# Columns of which the widths of layers are a multiple, by device: tiles of its matrix kernels and groups of quantized
# weights. Odd widths cost more speed than the removed units gain.
ALIGNMENT = {"cuda": 128, "cpu": 32}
FREE, UNIFORM = "free", "uniform"  # widths
SOLVER_MATRICES = 5  # float64 matrices of a part's width that exist at once in a solve

Scores = list[np.ndarray]
SEARCH_RULES: dict[str, Rule] = {
    "global": search,
    "uniform": search_uniform,
    "threshold": search_threshold,
}


@dataclass(frozen=True)
class StructuredPruning(Method):
    """Remove whole heads, FFN channels and convolution channels until a budget is met."""

    budget: Budget = field(metadata={"example": "budget: {parameters: 0.8}"})
    seq_len: int | None = renamed("tokens", default=None)  # for MACs and latency; null: the mean of the data
    max_sparsity: float | None = renamed("cap", default=None)  # per layer; null: 1 in encoders, 0.5 in decoders
    alignment: int | str | None = None  # widths are multiples of this, if much wider; null: by device; or `measured`
    ffn_multiple: int | None = renamed("multiple", default=None)  # keep FFN channels in multiples of this; null: align
    head_multiple: int | None = None  # keep heads (or KV groups) in multiples of this; null: align
    repair: str = renamed("finish", default="none")  # none, tune (one scale per unit) or full (refit the projection)
    solver: str = "lsmr"  # of tune: lsmr (as published) or ridge (damping relative to the Gram matrix)
    damping: float = 0.1  # of ridge and full, relative to the mean of the Gram diagonal
    intercept: bool | None = None  # of full: also fit a bias; null: yes, unless widths are uniform
    widths: str = FREE  # free, or uniform: the same in every layer, as other programs need

    search_rule: ClassVar[str] = "global"
    repairs: ClassVar[tuple[str, ...]] = ("none", "tune", "full")

    def __post_init__(self) -> None:
        one_of(self.name, "repair", self.repair, self.repairs)
        one_of(self.name, "solver", self.solver, ("lsmr", "ridge"))
        one_of(self.name, "widths", self.widths, (FREE, UNIFORM))
        if self.widths == UNIFORM and self.budget.measure == "latency":
            raise RecipeError("widths: uniform has no latency budget; give parameters, macs or bytes.")
        if isinstance(self.alignment, str):
            one_of(self.name, "alignment", self.alignment, (MEASURED,))
        for name, largest in (("alignment", 1024), ("ffn_multiple", 4096), ("head_multiple", 1024)):
            if isinstance(getattr(self, name), int):
                within(self.name, name, getattr(self, name), 1, largest)
        within(self.name, "damping", self.damping, 1e-8, 1e3)
        if self.max_sparsity is not None:
            within(self.name, "max_sparsity", self.max_sparsity, 0.0, 1.0)
        if self.seq_len is not None:
            within(self.name, "seq_len", self.seq_len, 1, 1_000_000)
        if self.budget.measure == "heads":
            raise RecipeError(
                f"{self.name} removes heads and channels; give a budget of parameters, macs, bytes or latency."
            )
        if self.budget.measure == "latency" and self.search_rule != "global":
            raise RecipeError(f"{self.name} cannot search under a latency budget; fisher can.")

    def observe(self, anatomy: Anatomy, context: MethodContext) -> Any:
        """Collect what the scores need: gradients, moments, or nothing."""
        return None

    @abstractmethod
    def scores(self, anatomy: Anatomy, observations: Any, context: MethodContext) -> Scores:
        """Return the importance of each unit, one vector per part."""

    def refine(self, anatomy: Anatomy, choice: KeptUnits, observations: Any) -> KeptUnits:
        """Re-select the units to keep; the number per part is fixed."""
        return choice

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        if self.alignment is None:
            return self.for_device(model.device.type).apply(model, context)
        if self.times_layers:
            self.check(model.anatomy)
            measured = measured_alignment(self._prunable_parts(model.anatomy), self.budget.keep, context).to_json()
            facts = self.with_choices({ALIGNMENT_CHOICE: measured}).apply(model, context)
            return {**facts, "measured_alignment": measured}
        anatomy = model.anatomy
        self.check(anatomy)
        before = block_parameters(anatomy)
        observations = self.observe(anatomy, context)
        scores = self.scores(anatomy, observations, context)
        choice = checkpointed_selection(
            context,
            anatomy,
            "choice",
            lambda: self.refine(anatomy, self.select_units(anatomy, scores, context, self.budget), observations),
        )
        facts = self.prune(model, choice, scores, observations, context)
        removed = before - block_parameters(model.anatomy)
        if removed <= 0 and self.budget.keep < 1:
            raise BudgetError(f"{self.name} removed nothing under the budget {self.budget.to_json()}.")
        return {"parameters_removed": removed, "block_parameters_before": before, **facts}

    @property
    def keeps_plain_shape(self) -> bool:
        return self.widths == UNIFORM

    @property
    def times_layers(self) -> bool:
        return self.alignment == MEASURED

    def with_choices(self, choices: Mapping[str, Any]) -> Self:
        measured = self.times_layers and ALIGNMENT_CHOICE in choices
        return replace(self, alignment=choices[ALIGNMENT_CHOICE]["multiple"]) if measured else self

    def _prunable_parts(self, anatomy: Anatomy) -> list[Part]:
        """Return the parts that lose units and whose multiple is not given."""
        given = {"heads": self.head_multiple, "ffn_channels": self.ffn_multiple}
        parts = [part for part in anatomy.parts if given.get(part.kind, 1) is None]
        return [part for part in parts if self.min_units(anatomy, part) < part.units]

    def for_device(self, device: str) -> Self:
        default = ALIGNMENT.get(device.partition(":")[0], ALIGNMENT["cpu"])
        return self if self.alignment is not None else replace(self, alignment=default)

    def check(self, anatomy: Anatomy) -> None:
        if quantized_layers(anatomy.network):
            raise ModelError("this model is already quantized; prune its source model, then quantize the result.")
        if all(part.fixed is not None for part in anatomy.parts):
            refuse_implants(anatomy.network, "no more channels can be removed from it")
            raise ModelError(
                f"{self.name} removes heads and channels, and Smelt does not know those of a "
                f"{anatomy.network.config.model_type} network; quantize it instead (rtn, hqq or gptq), or describe "
                f"its family ({GUIDE})."
            )
        if self.budget.measure == "latency" and any(part.head_parameters for part in anatomy.parts):
            raise ModelError(
                f"a latency budget knows plain attention and feed-forward, and layers of {anatomy.family.name} are "
                "neither; give a budget of parameters or macs."
            )
        self._check_repair(anatomy)
        if self.widths == UNIFORM:
            self._check_uniform(anatomy)

    def _check_uniform(self, anatomy: Anatomy) -> None:
        """Raise if other programs could not open the result."""
        if all(self.unit_counts(anatomy, part) == (part.units,) for part in anatomy.parts):
            raise RecipeError(
                f"widths: uniform would change nothing: transformers has no configuration field for narrower layers of "
                f"this {anatomy.family.name} network; remove it."
            )
        unbiased = any(part.output.bias is None for part in anatomy.parts)
        if unbiased and self.fits_bias(anatomy):
            raise RecipeError(
                "widths: uniform is for results that other programs open, and they would drop the biases that this "
                "repair adds; use repair: full without intercept, or repair: none."
            )

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        """Cut to the exact widths where no score decides them, otherwise to possible ones; check the budget."""
        if self.budget.keep == 1 or any(part.kind == "channels" for part in anatomy.parts):
            return undecided
        if (
            not undecided
            and not self.times_layers
            and (self.budget.measure in ("parameters", "bytes") or self._has_fixed_macs)
        ):
            no_scores = [np.zeros(part.units) for part in anatomy.parts]
            choice = self.select_units(anatomy, no_scores, MethodContext(), self.budget)
            if self.search_rule == "uniform":  # the numbers of units depend on the budget alone
                cut(anatomy.network, choice)
                return undecided
        widths, choice = dict(undecided), []
        for part in anatomy.parts:
            if self.min_units(anatomy, part) < part.units:
                widths[part.output.path] = self._undecided_width(part, undecided)
            multiple, least = self.unit_multiple(part), self.min_units(anatomy, part)
            largest = (part.units - 1) // multiple * multiple
            if self.widths == UNIFORM:
                largest = max((n for n in self.unit_counts(anatomy, part) if n < part.units), default=part.units)
            choice.append(np.arange(max(least, largest)))
        cut(anatomy.network, choice)
        return widths

    @property
    def _has_fixed_macs(self) -> bool:
        return self.budget.measure == "macs" and self.seq_len is not None

    def _undecided_width(self, part: Part, undecided: Mapping[str, UndecidedWidth]) -> UndecidedWidth:
        """Return what is certain about the kept inputs of the part's output: the number is a multiple, or all."""
        path, per_unit = part.output.path, part.columns_per_unit
        largest = undecided[path].multiple if path in undecided else part.output.in_features
        setting = "head_multiple" if part.kind == "heads" else "ffn_multiple"
        certain = math.gcd(self.unit_multiple(part) * per_unit, largest)
        return UndecidedWidth(certain, largest, per_unit, self.name, setting)

    def unit_multiple(self, part: Part) -> int:
        """Return the number of which the kept units of a part are a multiple, unless all are kept."""
        given = self.head_multiple if part.kind == "heads" else self.ffn_multiple
        if given is not None:
            return given
        return aligned_units(part, self.alignment if isinstance(self.alignment, int) else 1)

    @property
    def uses_data(self) -> bool:
        return super().uses_data or self.repair != "none"

    def targets(self) -> dict[str, float]:
        return self.budget.to_json()

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        """Estimate the repair: teacher and student run every block; the equations of one part exist at a time."""
        if self.repair not in ("tune", "full"):
            return ResourceEstimate(1.0 if "calibration data" in self.needs else 0.0)
        widest = max(part.output.in_features * part.output.kernel_elements for part in anatomy.parts)
        hidden = ACTIVATION_COPIES * 4 * size.tokens * anatomy.hidden_size
        hidden = hidden if memory_limit is None else min(hidden, memory_limit)
        return ResourceEstimate(passes=3.5, memory=hidden + SOLVER_MATRICES * 8 * widest * widest)

    def select_units(self, anatomy: Anatomy, scores: Scores, context: MethodContext, budget: Budget) -> KeptUnits:
        """Select the units to keep under a budget."""
        if budget.keep == 1:
            return [np.arange(part.units) for part in anatomy.parts]
        workload = self.workload(anatomy, context)
        if budget.measure == "latency":
            candidates = self.candidates(anatomy, scores, [0.0] * len(scores))
            return search_under_latency(anatomy, candidates, budget.keep, workload, context.seed)
        measure: Any = budget.measure
        candidates = self.candidates(anatomy, scores, unit_costs(anatomy, measure, workload))
        allowed = budget.keep * block_cost(anatomy, measure, workload) - self.added_cost(anatomy, measure)
        equal = self.widths == UNIFORM and self.search_rule != "uniform"
        rule = search_equal if equal else SEARCH_RULES[self.search_rule]
        return search_true_cost(anatomy, candidates, rule, allowed, measure, workload)

    def added_cost(self, anatomy: Anatomy, measure: str) -> float:
        """Return the cost of biases that the repair adds; convolutions get none."""
        if measure not in ("parameters", "bytes") or not self.fits_bias(anatomy):
            return 0.0
        outputs = [part.output for part in anatomy.parts if part.output.bias is None and part.kind != "channels"]
        size = outputs[0].weight.element_size() if outputs and measure == "bytes" else 1
        return float(size * sum(output.out_features for output in outputs))

    def fits_bias(self, anatomy: Anatomy) -> bool:
        """Return whether the repair fits biases, which are new where the output projection has none."""
        if self.repair != "full":
            return False
        if self.intercept is not None:
            return self.intercept
        return self.widths != UNIFORM or all(part.output.bias is not None for part in anatomy.parts)

    def candidates(self, anatomy: Anatomy, scores: Scores, part_costs: Sequence[float]) -> list[Candidates]:
        """Return the units of each part for the search, with the minimum number to keep."""
        return [
            Candidates(
                kind=part.kind,
                importance=np.asarray(score, dtype=np.float64),
                unit_cost=cost,
                min_units=self.min_units(anatomy, part),
                multiple=self.unit_multiple(part),
                counts=self.unit_counts(anatomy, part) if self.widths == UNIFORM else (),
            )
            for part, score, cost in zip(anatomy.parts, scores, part_costs, strict=True)
        ]

    def unit_counts(self, anatomy: Anatomy, part: Part) -> tuple[int, ...]:
        """Return the numbers of units of a part that its family can have in all layers, and that may be kept."""
        alike = [other for other in anatomy.parts if (other.kind, other.units) == (part.kind, part.units)]
        least = max(self.min_units(anatomy, other) for other in alike)
        multiple = self.unit_multiple(part)
        counts = [n for n in range(multiple, part.units, multiple) if n >= least and has_plain_field(anatomy, part, n)]
        return (*counts, part.units)

    def min_units(self, anatomy: Anatomy, part: Part) -> int:
        """Return the minimum number of units to keep.

        That is what `max_sparsity` leaves; at least one channel, and one unit in the first two and the last block of a
        decoder; all units of a part that cannot be pruned.
        """
        if part.fixed:
            return part.units
        causal = anatomy.family.causal
        max_sparsity = self.max_sparsity if self.max_sparsity is not None else (0.5 if causal else 1.0)
        minimum = part.units - int(np.floor(part.units * max_sparsity + 1e-9))
        ends = causal and part.block in (0, 1, len(anatomy.blocks) - 1)
        stays = part.implant is not None or (part.attention is not None and not part.attention.removable)
        return max(minimum, 1 if part.kind == "channels" or ends or stays else 0)

    def workload(self, anatomy: Anatomy, context: MethodContext) -> Workload:
        size = getattr(anatomy.network.config, "image_size", 224)
        image_size = size if isinstance(size, int) else 224
        return Workload(tokens=self.seq_len or max(1, round(context.mean_tokens)), image_size=image_size)

    def prune(
        self, model: Model, choice: KeptUnits, scores: Scores, observations: Any, context: MethodContext
    ) -> dict[str, Any]:
        """Remove all units but the selected ones, and repair the rest."""
        if self.repair == "none":
            cut(model.network, choice)
            return {}
        if any(part.kind == "channels" for part in model.anatomy.parts):
            return cut_and_refit(model, choice, self.repair_settings(model), context)
        return cut_and_repair(model, choice, self.repair_settings(model), context)

    def repair_settings(self, model: Model) -> RepairSettings:
        causal = model.anatomy.family.causal
        return RepairSettings(
            mode=self.repair,
            solver=self.solver,
            damping=self.damping,
            intercept=self.fits_bias(model.anatomy),
            skip_first_token=causal,
        )

    def _check_repair(self, anatomy: Anatomy) -> None:
        if any(part.kind == "channels" for part in anatomy.parts):
            if self.repair not in ("none", "full"):
                raise RecipeError(
                    f"repair: {self.repair} supports attention and feed-forward parts; for convolutions use "
                    "repair: full or repair: none."
                )
            return
        if self.repair in ("tune", "full") and (anatomy.residual == "other" or anatomy.family.chain is not True):
            raise RecipeError(
                f"repair: {self.repair} needs blocks that follow one another and add attention and feed-forward to the "
                f"residual, which {anatomy.family.name} networks do not; use repair: none."
            )
        if self.repair in ("tune", "full") and any(part.mixture is not None for part in anatomy.parts):
            raise RecipeError(
                f"repair: {self.repair} fits one feed-forward per block; for a mixture of experts use repair: none."
            )


def sum_per_unit(part: Part, value: Callable[[Projection], Tensor]) -> np.ndarray:
    """Sum a value per weight ([out, in, ...]) over the rows and columns of each unit: [units]."""
    total = torch.zeros(part.units, dtype=torch.float64, device=part.output.device)
    for projection, rows in zip(part.input_projections, part.rows_per_unit, strict=True):
        total += value(projection).flatten(1).sum(1).view(part.units, rows).sum(1)
    total += value(part.output).transpose(0, 1).flatten(1).sum(1).view(part.units, part.columns_per_unit).sum(1)
    return total.cpu().numpy()
