"""Select units by their true cost under a budget, and keep a selection so that a repeated run makes the same one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from smelt.compression.allocation.unit_search import Candidates, KeptUnits
from smelt.compression.base import MethodContext
from smelt.errors import BudgetError, RecipeError
from smelt.measure.cost import CostMetric, Workload, cost_with_units
from smelt.models.anatomy import Anatomy, Part

Rule = Callable[[Sequence[Candidates], float], KeptUnits]

BISECTIONS = 30  # of the budget, where unit costs are not exact


def search_true_cost(
    anatomy: Anatomy,
    candidates: Sequence[Candidates],
    rule: Rule,
    allowed: float,
    measure: CostMetric,
    workload: Workload,
    added_cost: Callable[[KeptUnits], float] | None = None,
) -> KeptUnits:
    """Return the largest selection by a rule whose true cost is allowed.

    Costs per unit are exact except for convolutions, whose cost depends on neighboring parts, and where a selection has
    an `added_cost` besides its units: there the budget of the rule is bisected until the true cost fits.
    """
    everything = [part.units for part in anatomy.parts]
    units = sum(part.unit_cost * len(part.importance) for part in candidates)
    fixed = cost_with_units(anatomy, everything, measure, workload) - units

    def true_cost(choice: KeptUnits) -> float:
        cost = cost_with_units(anatomy, [len(kept) for kept in choice], measure, workload)
        return cost if added_cost is None else cost + added_cost(choice)

    if added_cost is None and all(part.kind != "channels" for part in anatomy.parts):
        return rule(candidates, allowed - fixed)
    best, low, high = None, 0.0, units
    for _ in range(BISECTIONS):
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
        raise BudgetError(
            f"the budget cannot be met: {measure} exceed it with as few units as layers may keep; allow more."
        )
    return best


def checkpointed_selection(
    context: MethodContext, anatomy: Anatomy, name: str, choose: Callable[[], KeptUnits]
) -> KeptUnits:
    """Return the recorded or checkpointed selection, or make it: a latency measured again could change it."""
    done = context.checkpoint.load(name)
    if done is not None:
        choice = [done[key].numpy() for key in sorted(done)]
    else:
        recorded = context.choices.recorded(name)
        choice = choose() if recorded is None else _recorded_selection(anatomy, recorded)
        context.checkpoint.save(name, {f"{i:05d}": torch.from_numpy(kept) for i, kept in enumerate(choice)})
    context.choices.record(name, [_format_ranges(kept.tolist()) for kept in choice])
    return choice


def _recorded_selection(anatomy: Anatomy, recorded: Any) -> KeptUnits:
    """Return a selection from a file after checking that it names units of this network."""
    texts = isinstance(recorded, list) and all(isinstance(text, str) for text in recorded)
    if not texts or len(recorded) != len(anatomy.parts):
        raise RecipeError("the recorded choice of units does not fit this network.")
    return [parse_ranges(text, part) for part, text in zip(anatomy.parts, recorded, strict=True)]


def _format_ranges(units: Sequence[int]) -> str:
    """Write ascending numbers as ranges: `0-3,7`."""
    known = set(units)
    starts, ends = [unit for unit in units if unit - 1 not in known], [unit for unit in units if unit + 1 not in known]
    ranges = zip(starts, ends, strict=True)
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in ranges)


def parse_ranges(text: Any, part: Part) -> np.ndarray:
    """Read ascending ranges of the units of a part."""
    units: list[int] = []
    ranges = text.split(",") if text else []
    for entry in ranges:
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", entry, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (-1, -1)
        if not (units[-1] if units else -1) < first <= last < part.units:
            raise RecipeError(f"the recorded choice of units of {part.name} does not fit this network.")
        units += range(first, last + 1)
    return np.array(units, dtype=np.int64)
