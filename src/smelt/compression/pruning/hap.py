"""HAP: Hessian-aware pruning with a neural implant (Yu et al., 2022).

Removing the weights w_p and letting the others adapt costs about tr(H_pp) / (2 p) * ||w_p||^2 of loss, where p is their
number: the mean curvature times their squared norm. Traces are Hutchinson's, signed as in the released code. All units
of all layers have one ranking: per parameter, so that a head, which is as large as hundreds of channels, competes with
them under a budget; the released code ranks channels as they are (`ranking: unit`).

A unit's weights are its rows in each input projection and its columns in the output projection. Each of these blocks
has its own trace and norm, so that scaling one layer by a and the next by 1/a changes nothing. The released code takes
the kernels of a channel alone (`weights: rows`).

The implant replaces the most sensitive of the units that would be removed. In a convolution it is a 1x1 kernel, in
attention and feed-forward a low-rank product of their input, as wide as a fraction of the columns that leave. At first
it adds nothing: the network equals one without these units. The zeros are in the layer that reads the implanted units.
The released code has them in the 1x1 kernel; behind a batch norm and a ReLU such a channel is either not zero (its norm
has a bias) or has no gradient. The 1x1 kernel begins as the center of the one that it replaces, the low-rank product
reads the main directions of the path of the removed units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from smelt.compression.allocation.unit_search import KeptUnits, search_threshold
from smelt.compression.base import (
    METHODS,
    CalibrationSize,
    MethodContext,
    ResourceEstimate,
    UndecidedWidth,
    one_of,
    within,
)
from smelt.compression.budget import Budget
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.calibration.hessian import UnitTraces, hessian_traces
from smelt.compression.pruning.base import FREE, Scores, StructuredPruning
from smelt.compression.pruning.selection import search_true_cost
from smelt.errors import ModelError, RecipeError
from smelt.measure.cost import (
    Workload,
    block_cost,
    block_parameters,
    channel_positions,
    cost_with_units,
    unit_costs,
    unit_parameters,
)
from smelt.models.anatomy import Anatomy, Part
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.implants import implant_channels, implant_low_rank, unimplantable_reason
from smelt.models.model import Model
from smelt.models.surgery import expand_units, keep_units

BLOCKS, ROWS = "blocks", "rows"  # weights
UNIT, PARAMETER = "unit", "parameter"  # ranking


@METHODS.register(
    "hap",
    paper="Yu et al., Hessian-Aware Pruning and Optimal Neural Implant, WACV 2022 (arXiv 2101.08940)",
    needs=("calibration data", "labels or text", "gradients"),
)
@dataclass(frozen=True)
class Hap(StructuredPruning):
    """Use before fine-tuning, for convolution networks above all; an implant keeps part of what is removed."""

    max_sparsity: float | None = 0.95  # per layer; null: 1 in encoders, 0.5 in decoders
    probes: int = 50  # random vectors per mini-batch that estimate the traces
    weights: str = BLOCKS  # of a unit: blocks (all that leave with it), or rows (those that compute it, as published)
    ranking: str = PARAMETER  # by the sensitivity per parameter, or per unit, as published
    implant: float = 0.0  # fraction of the units to remove that an implant replaces; published: 0.1
    implant_rank: float = 0.125  # of an implant in attention or feed-forward, relative to the columns it replaces

    search_rule: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "probes", self.probes, 1, 100_000)
        one_of(self.name, "weights", self.weights, (BLOCKS, ROWS))
        one_of(self.name, "ranking", self.ranking, (UNIT, PARAMETER))
        within(self.name, "implant", self.implant, 0.0, 1.0)
        within(self.name, "implant_rank", self.implant_rank, 1e-3, 1.0)
        if self.implant and self.repair != "none":
            raise RecipeError("an implant of hap is trained after pruning, not fitted; use repair: none with it.")
        if self.implant and self.widths != FREE:
            raise RecipeError("other programs do not know the implants of hap; use widths: free or implant: 0.")

    @property
    def keeps_plain_shape(self) -> bool:
        return super().keeps_plain_shape and not self.implant

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if not self.implant:
            return
        reasons = {part.name: unimplantable_reason(anatomy, part) for part in anatomy.parts}
        if None not in reasons.values():
            name, reason = next(iter(reasons.items()))
            raise ModelError(f"hap can put no implant into this network: {name}: {reason}; use implant: 0.")

    def reshape(self, anatomy: Anatomy, undecided: Any) -> Any:
        """Also install implants, of the smallest size: what follows must know that there are some."""
        widths: dict[str, UndecidedWidth] = dict(super().reshape(anatomy, undecided))
        if self.implant and self.budget.keep < 1:
            for part in (shaped := anatomy_of(anatomy.network)).parts:
                if unimplantable_reason(shaped, part) is None:
                    _install(anatomy.network, part, 1)
        return widths

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        """Estimate two backward passes per probe, whose graph holds about three times what one pass saves."""
        repair = super().estimate_resources(anatomy, size, memory_limit)
        memory = 3 * gradient_bytes(anatomy, size.batch_size, size.seq_len) + 5 * 4 * block_parameters(anatomy)
        return ResourceEstimate(repair.passes + 3 + 4 * self.probes, max(repair.memory, memory))

    def observe(self, anatomy: Anatomy, context: MethodContext) -> list[UnitTraces]:
        return hessian_traces(anatomy, context.batches, self.probes, context.seed, context.progress, context.checkpoint)

    def scores(self, anatomy: Anatomy, observations: list[UnitTraces], context: MethodContext) -> Scores:
        traces = observations if self.weights == BLOCKS else [each.rows() for each in observations]
        sizes = [1 if self.ranking == UNIT else max(unit_parameters(part), 1) for part in anatomy.parts]
        return [each.sensitivity().mean(0) / size for each, size in zip(traces, sizes, strict=True)]

    def select_units(self, anatomy: Anatomy, scores: Scores, context: MethodContext, budget: Budget) -> KeptUnits:
        """Select the units to keep so that they meet the budget together with the implants."""
        if not self.implant or budget.keep == 1:
            return super().select_units(anatomy, scores, context, budget)
        workload, measure = self.workload(anatomy, context), budget.measure
        costs: Any = _ImplantCosts(anatomy, measure, workload)
        candidates = self.candidates(anatomy, scores, unit_costs(anatomy, costs.measure, workload))
        return search_true_cost(
            anatomy, candidates, search_threshold, budget.keep * block_cost(anatomy, costs.measure, workload),
            costs.measure, workload, lambda choice: costs.added(choice, self.implant_sizes(anatomy, scores, choice)),
        )  # fmt: skip

    def bands(self, anatomy: Anatomy, scores: Scores, choice: KeptUnits) -> list[np.ndarray]:
        """Return the units of each part that an implant replaces: the most sensitive of those not kept."""
        removed = [np.setdiff1d(np.arange(part.units), kept) for part, kept in zip(anatomy.parts, choice, strict=True)]
        ranked = np.sort(
            np.concatenate([part_scores[units] for part_scores, units in zip(scores, removed, strict=True)])
        )
        count = round(self.implant * len(ranked))
        threshold = ranked[len(ranked) - count] if count else np.inf
        return [
            units[part_scores[units] >= threshold]
            if unimplantable_reason(anatomy, part) is None and len(kept)
            else units[:0]
            for part, part_scores, units, kept in zip(anatomy.parts, scores, removed, choice, strict=True)
        ]

    def implant_sizes(self, anatomy: Anatomy, scores: Scores, choice: KeptUnits) -> list[int]:
        """Return the channels of each implanted convolution and the rank of each other implant; 0: none."""
        bands = self.bands(anatomy, scores, choice)
        return [self._size(part, len(band)) for part, band in zip(anatomy.parts, bands, strict=True)]

    def prune(
        self, model: Model, choice: KeptUnits, scores: Scores, observations: list[UnitTraces], context: MethodContext
    ) -> dict[str, Any]:
        errors = {"trace_error": _median_error(observations)}
        if not self.implant:
            return {**errors, **super().prune(model, choice, scores, observations, context)}
        bands = self.bands(model.anatomy, scores, choice)
        self._cut_and_implant(model, choice, bands)
        return {**errors, "implanted_units": sum(len(band) for band in bands)}

    @torch.no_grad()
    def _cut_and_implant(self, model: Model, choice: KeptUnits, bands: Sequence[np.ndarray]) -> None:
        """Remove all units but the selected ones, with an implant for the band of each part."""
        anatomy = model.anatomy
        directions = [
            _main_directions(part, band, self._size(part, len(band))) if len(band) and part.kind != "channels" else None
            for part, band in zip(anatomy.parts, bands, strict=True)
        ]
        for part, kept, band in zip(anatomy.parts, choice, bands, strict=True):
            keep_units(model.network, part, [*kept, *band] if part.kind == "channels" else kept.tolist())
        for part, band, down in zip(model.anatomy.parts, bands, directions, strict=True):
            if len(band):
                _install(model.network, part, self._size(part, len(band)), down)

    def _size(self, part: Part, units: int) -> int:
        """Return the channels of an implant, or the rank of one in attention or feed-forward."""
        if part.kind == "channels" or not units:
            return units
        largest = min(part.input_projections[0].in_features, part.output.out_features)
        return min(math.ceil(self.implant_rank * units * part.columns_per_unit), largest)


class _ImplantCosts:
    """What implants cost by a measure, before they are installed."""

    def __init__(self, anatomy: Anatomy, measure: Any, workload: Workload) -> None:
        self.anatomy, self.measure, self.workload = anatomy, measure, workload
        self.positions = channel_positions(anatomy, workload) if measure == "macs" else [(1, 1)] * len(anatomy.parts)

    def added(self, choice: KeptUnits, sizes: Sequence[int]) -> float:
        """Return the cost of implants of these sizes beside the units that are kept."""
        kept = [len(units) for units in choice]
        wide = [
            n + size if part.kind == "channels" else n
            for n, size, part in zip(kept, sizes, self.anatomy.parts, strict=True)
        ]
        dense = self._cost(wide) - self._cost(kept)
        return dense + sum(
            self._change(part, index, size, kept)
            for index, (part, size) in enumerate(zip(self.anatomy.parts, sizes, strict=True))
        )

    def _cost(self, counts: Sequence[int]) -> float:
        return cost_with_units(self.anatomy, counts, self.measure, self.workload)

    def _change(self, part: Part, index: int, size: int, kept: Sequence[int]) -> float:
        """Return the cost of a low-rank product, or by how much 1x1 kernels are cheaper (negative)."""
        first = part.input_projections[0] if part.input_projections else part.output
        each = part.output.weight.element_size() if self.measure == "bytes" else 1
        if part.kind != "channels":
            uses = self.workload.tokens if self.measure == "macs" else 1
            return float(each * uses * size * (first.in_features + part.output.out_features))
        before = (n for other, n in zip(self.anatomy.parts, kept, strict=True) if other.output.module is first.module)
        inputs = next(before, first.in_features)
        return -float(each * size * inputs * (first.kernel_elements - 1) * self.positions[index][0])


@torch.no_grad()
def _install(network: Any, part: Part, size: int, down: Tensor | None = None) -> None:
    """Give a part an implant that adds nothing yet: the layer that reads its units has zeros for it."""
    if part.kind == "channels":
        implant_channels(network, part, size)
        part.output.weight[:, part.units - size :] = 0
        return
    implant = implant_low_rank(network, part, size)
    implant.up.weight.zero_()
    if down is not None:
        implant.down.weight.copy_(down)


def _main_directions(part: Part, band: np.ndarray, rank: int) -> Tensor:
    """Return the main directions of the inputs of the product of the band's first and last layer: [rank, in].

    Of attention, these are the values and the output: the path of a token that attends to itself.
    """
    index = torch.as_tensor(band, device=part.output.device)
    first = (part.values or part.input_projections[-1]) if part.kind == "heads" else part.input_projections[0]
    rows = first.weight[expand_units(index, first.out_features // part.units)].double()
    columns = part.output.weight[:, expand_units(index, part.columns_per_unit)].double()
    if part.heads_per_unit > 1:  # query heads that share the values of one KV head
        rows = rows.unflatten(0, (len(band), 1, part.head_dim)).expand(-1, part.heads_per_unit, -1, -1).flatten(0, 2)
    directions: Tensor = torch.linalg.svd(columns @ rows, full_matrices=False).Vh[:rank]
    return directions


def _median_error(traces: Sequence[UnitTraces]) -> float | None:
    """Return the median over units of the standard error of the sensitivity, relative to it; None with one probe."""
    estimates = np.concatenate([each.sensitivity() for each in traces], axis=1)  # [probes, units]
    if len(estimates) < 2:
        return None
    errors = estimates.std(0, ddof=1) / math.sqrt(len(estimates))
    return float(np.median(errors / np.maximum(np.abs(estimates.mean(0)), 1e-30)))
