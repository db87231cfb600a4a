"""The plan with the shortest predicted step that fits into memory.

Small models are searched whole: all ways to cut the layers into units, all sets of units that stay whole after forward,
all depths. Large ones are climbed: from plans with equal units and the last ones kept, one change at a time (keep or
give back a unit, join two, cut one, another depth) as long as the step becomes shorter. That finds a good plan, not
provably the best one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from smelt.errors import ResourceError
from smelt.train.fsdp.facts import ClusterSpec, ModelProfile
from smelt.train.fsdp.plan import MAX_PREFETCH, MIN_BACKWARD_PREFETCH, ShardingPlan, ShardUnit
from smelt.train.fsdp.timeline import Timeline, predict_timeline

MOST = 10_000  # plans that are all tried
_SWEEPS = 20
_DEPTHS = tuple(product(range(MAX_PREFETCH + 1), range(MIN_BACKWARD_PREFETCH, MAX_PREFETCH + 1)))
_SHARES_KEPT = (0.0, 0.25, 0.5, 1.0)  # of the units, from the last one on: where a climb begins

_Worth = tuple[float, float, float, int]


@dataclass(frozen=True)
class PlanSearchResult:
    plan: ShardingPlan
    timeline: Timeline
    exhaustive: bool  # whether all plans were tried


def search_plan(model: ModelProfile, machines: ClusterSpec, most: int = MOST) -> PlanSearchResult:
    """`most`: how many plans may be tried one by one; with more of them the search climbs."""
    whole = number_of_plans(len(model.layers)) <= most
    plans = all_plans(len(model.layers)) if whole else first_plans(len(model.layers))
    worths = {plan: _worth(plan, model, machines) for plan in plans}
    best = min(worths, key=lambda plan: worths[plan])
    if not whole:
        best = _climb(best, model, machines)
    found = predict_timeline(model, best, machines)
    assert found.peak is not None
    if found.peak > machines.memory:
        smallest = "the smallest" if whole else "the smallest that was found"
        raise ResourceError(
            f"no plan fits: {smallest} needs {found.peak / 1e9:.3g} GB on each of {machines.workers} workers and "
            f"{machines.memory / 1e9:.3g} GB are allowed; use more workers, smaller batches or shorter samples."
        )
    return PlanSearchResult(best, found, whole)


def number_of_plans(layers: int) -> int:
    """Every boundary is cut or not, every unit kept or not: 2 * 3^(layers - 1) ways, at every depth."""
    return int(2 * 3 ** (layers - 1) * len(_DEPTHS))


def all_plans(layers: int) -> Iterator[ShardingPlan]:
    for cuts in product((False, True), repeat=layers - 1):
        borders = [0, *(place for place, cut in enumerate(cuts, 1) if cut), layers]
        for flags in product((False, True), repeat=len(borders) - 1):
            for depths in _DEPTHS:
                yield _plan(borders, flags, depths)


def first_plans(layers: int) -> Iterator[ShardingPlan]:
    """Units of 1, 2, 4 ... layers, the last of which stay whole."""
    size = 1
    while True:
        borders = [*range(0, layers, size), layers]
        units = len(borders) - 1
        for share, depths in product(_SHARES_KEPT, _DEPTHS):
            kept = max(round(share * units), 1 if share else 0)
            yield _plan(borders, tuple(number < units - kept for number in range(units)), depths)
        if size >= layers:
            return
        size *= 2


def _plan(borders: list[int], flags: tuple[bool, ...], depths: tuple[int, int]) -> ShardingPlan:
    ends = zip(borders, borders[1:], flags, strict=False)
    return ShardingPlan(tuple(ShardUnit(first, stop, flag) for first, stop, flag in ends), *depths)


def _worth(plan: ShardingPlan, model: ModelProfile, machines: ClusterSpec) -> _Worth:
    """Smaller is better: what is too much memory, the step, the memory, the number of collectives."""
    found = predict_timeline(model, plan, machines)
    assert found.peak is not None
    return max(found.peak - machines.memory, 0.0), round(found.seconds, 12), found.peak, len(plan.units)


def _climb(plan: ShardingPlan, model: ModelProfile, machines: ClusterSpec) -> ShardingPlan:
    worth = _worth(plan, model, machines)
    for _ in range(_SWEEPS):
        before = plan
        for other in _neighbours(before):
            tried = _worth(other, model, machines)
            if tried < worth:
                plan, worth = other, tried
        if plan is before:
            break
    return plan


def _neighbours(plan: ShardingPlan) -> Iterator[ShardingPlan]:
    units = plan.units
    for ahead, behind in _DEPTHS:
        yield replace(plan, forward_prefetch=ahead, backward_prefetch=behind)
    for place, unit in enumerate(units):
        before, after = units[:place], units[place + 1 :]
        yield replace(
            plan, units=(*before, replace(unit, reshard_after_forward=not unit.reshard_after_forward), *after)
        )
        if after:
            joined = replace(
                unit,
                stop=after[0].stop,
                reshard_after_forward=unit.reshard_after_forward and after[0].reshard_after_forward,
            )
            yield replace(plan, units=(*before, joined, *after[1:]))
        for cut in range(unit.first + 1, unit.stop):
            yield replace(plan, units=(*before, replace(unit, stop=cut), replace(unit, first=cut), *after))
