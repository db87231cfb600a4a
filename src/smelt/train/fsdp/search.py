"""Find the plan with the shortest predicted step that fits into memory.

Small models are searched exhaustively: all ways to group the layers into units, all choices of units that reshard after
forward, all prefetch depths. Large ones by local search: from plans with equal units whose last ones are not resharded,
apply one change at a time (flip a unit's resharding, merge two, split one, change a depth) while the step gets shorter.
That finds a good plan, not provably the best one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from smelt.errors import ResourceError
from smelt.train.fsdp.plan import (
    MAX_PREFETCH,
    MIN_BACKWARD_PREFETCH,
    ClusterSpec,
    ModelProfile,
    ShardingPlan,
    ShardUnit,
)
from smelt.train.fsdp.timeline import StepTimeline, predict_timeline

MAX_EXHAUSTIVE = 10_000  # plans
_MAX_SWEEPS = 20
_PREFETCH_DEPTHS = tuple(product(range(MAX_PREFETCH + 1), range(MIN_BACKWARD_PREFETCH, MAX_PREFETCH + 1)))
_KEPT_FRACTIONS = (0.0, 0.25, 0.5, 1.0)  # of the units, counted from the last: not resharded where a search starts

_Cost = tuple[float, float, float, int]


@dataclass(frozen=True)
class PlanSearchResult:
    plan: ShardingPlan
    timeline: StepTimeline
    exhaustive: bool  # whether all plans were tried


def search_plan(model: ModelProfile, cluster: ClusterSpec, max_exhaustive: int = MAX_EXHAUSTIVE) -> PlanSearchResult:
    """Find the fastest plan that fits; with more than `max_exhaustive` possible plans by local search."""
    exhaustive = count_plans(len(model.layers)) <= max_exhaustive
    plans = all_plans(len(model.layers)) if exhaustive else initial_plans(len(model.layers))
    costs = {plan: _cost(plan, model, cluster) for plan in plans}
    best = min(costs, key=lambda plan: costs[plan])
    if not exhaustive:
        best = _local_search(best, model, cluster)
    timeline = predict_timeline(model, best, cluster)
    assert timeline.peak_memory is not None
    if timeline.peak_memory > cluster.memory:
        smallest = "the smallest" if exhaustive else "the smallest that was tried"
        raise ResourceError(
            f"no plan fits: {smallest} needs {timeline.peak_memory / 1e9:.3g} GB on each of {cluster.world_size} ranks "
            f"and {cluster.memory / 1e9:.3g} GB are allowed; use more ranks, smaller batches or shorter samples."
        )
    return PlanSearchResult(best, timeline, exhaustive)


def count_plans(num_layers: int) -> int:
    """Count the plans: split or not at each boundary, reshard or not per unit: 2 * 3^(layers - 1), times the depths."""
    return int(2 * 3 ** (num_layers - 1) * len(_PREFETCH_DEPTHS))


def all_plans(num_layers: int) -> Iterator[ShardingPlan]:
    for splits in product((False, True), repeat=num_layers - 1):
        bounds = [0, *(index for index, split in enumerate(splits, 1) if split), num_layers]
        for reshard in product((False, True), repeat=len(bounds) - 1):
            for depths in _PREFETCH_DEPTHS:
                yield _plan(bounds, reshard, depths)


def initial_plans(num_layers: int) -> Iterator[ShardingPlan]:
    """Yield plans with units of 1, 2, 4 ... layers, the last of which are not resharded."""
    size = 1
    while True:
        bounds = [*range(0, num_layers, size), num_layers]
        num_units = len(bounds) - 1
        for fraction, depths in product(_KEPT_FRACTIONS, _PREFETCH_DEPTHS):
            kept = max(round(fraction * num_units), 1 if fraction else 0)
            yield _plan(bounds, tuple(index < num_units - kept for index in range(num_units)), depths)
        if size >= num_layers:
            return
        size *= 2


def _plan(bounds: list[int], reshard: tuple[bool, ...], depths: tuple[int, int]) -> ShardingPlan:
    units = zip(bounds, bounds[1:], reshard, strict=False)
    return ShardingPlan(tuple(ShardUnit(first, stop, flag) for first, stop, flag in units), *depths)


def _cost(plan: ShardingPlan, model: ModelProfile, cluster: ClusterSpec) -> _Cost:
    """Order plans, lower is better: memory above the limit, step time, peak memory, number of units."""
    timeline = predict_timeline(model, plan, cluster)
    assert timeline.peak_memory is not None
    excess = max(timeline.peak_memory - cluster.memory, 0.0)
    return excess, round(timeline.seconds, 12), timeline.peak_memory, len(plan.units)


def _local_search(plan: ShardingPlan, model: ModelProfile, cluster: ClusterSpec) -> ShardingPlan:
    cost = _cost(plan, model, cluster)
    for _ in range(_MAX_SWEEPS):
        start = plan
        for neighbor in _neighbors(start):
            neighbor_cost = _cost(neighbor, model, cluster)
            if neighbor_cost < cost:
                plan, cost = neighbor, neighbor_cost
        if plan is start:
            break
    return plan


def _neighbors(plan: ShardingPlan) -> Iterator[ShardingPlan]:
    units = plan.units
    for forward, backward in _PREFETCH_DEPTHS:
        yield replace(plan, forward_prefetch=forward, backward_prefetch=backward)
    for index, unit in enumerate(units):
        before, after, reshard = units[:index], units[index + 1 :], unit.reshard_after_forward
        yield replace(plan, units=(*before, replace(unit, reshard_after_forward=not reshard), *after))
        if after:
            reshard_both = reshard and after[0].reshard_after_forward
            merged = replace(unit, stop=after[0].stop, reshard_after_forward=reshard_both)
            yield replace(plan, units=(*before, merged, *after[1:]))
        for split in range(unit.first + 1, unit.stop):
            yield replace(plan, units=(*before, replace(unit, stop=split), replace(unit, first=split), *after))
