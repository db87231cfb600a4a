"""Choose the units to keep under a budget: by exact search, with one width or ratio for all layers, or by a threshold.

The exact search (Kwon et al., 2022): all heads cost the same and so do all FFN channels, so for every number of heads,
the best heads and the best channels that still fit are prefixes of two sorted lists, and the best pair wins.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smelt.errors import BudgetError


@dataclass(frozen=True)
class Candidates:
    """The units of one part: their importance, cost, and constraints on how many are kept."""

    kind: str
    importance: np.ndarray  # [units]
    unit_cost: float
    min_units: int = 0  # minimum number of units to keep
    multiple: int = 1  # the number kept is a multiple of this, or all
    counts: tuple[int, ...] = ()  # the numbers that may be kept, ascending, where widths are uniform; empty: any

    def ranking(self) -> np.ndarray:
        """Return units from most to least important; ties by index, so that the choice is deterministic."""
        return np.argsort(-self.importance, kind="stable")


KeptUnits = list[np.ndarray]  # the indices kept in each part, ascending


def cost(parts: Sequence[Candidates], choice: KeptUnits) -> float:
    return sum(part.unit_cost * len(kept) for part, kept in zip(parts, choice, strict=True))


def kept_importance(parts: Sequence[Candidates], choice: KeptUnits) -> float:
    return float(sum(part.importance[kept].sum() for part, kept in zip(parts, choice, strict=True)))


def search(parts: Sequence[Candidates], capacity: float) -> KeptUnits:
    """Return the choice of maximum importance that costs at most `capacity`.

    Exact for two costs (heads and FFN channels). With more costs (convolutions), greedy by importance per cost.
    """
    forced = [required_count(part) for part in parts]
    remaining = capacity - sum(part.unit_cost * count for part, count in zip(parts, forced, strict=True))
    _check_remaining(remaining, capacity)
    items = [_bundle_importance(part, count) for part, count in zip(parts, forced, strict=True)]
    groups: dict[tuple[str, float], list[int]] = {}
    for position, part in enumerate(parts):
        groups.setdefault((part.kind, part.unit_cost * part.multiple), []).append(position)
    if len(groups) <= 2:
        bundles = _search_two_groups(list(groups.values()), [cost for _, cost in groups], items, remaining)
    else:
        bundles = _by_density(parts, items, remaining)
    return [
        np.sort(part.ranking()[: min(count + extra * part.multiple, len(part.importance))])
        for part, count, extra in zip(parts, forced, bundles, strict=True)
    ]


def search_uniform(parts: Sequence[Candidates], capacity: float) -> KeptUnits:
    """Keep the same fraction of every layer: heads first, to the nearest count, then channels within the remainder."""
    full = sum(part.unit_cost * len(part.importance) for part in parts)
    fraction = min(1.0, max(0.0, capacity / full))
    counts = [_fraction_of_units(part, fraction, up=part.kind == "heads") for part in parts]
    flexible = [i for i, part in enumerate(parts) if part.kind != "heads"]
    spent = sum(parts[i].unit_cost * counts[i] for i in range(len(parts)) if i not in flexible)
    remaining = capacity - spent
    full_flexible = sum(parts[i].unit_cost * len(parts[i].importance) for i in flexible)
    if flexible:
        fraction = min(1.0, remaining / full_flexible)
        for i in flexible:
            counts[i] = _fraction_of_units(parts[i], fraction, up=False)
    choice = [np.sort(part.ranking()[:count]) for part, count in zip(parts, counts, strict=True)]
    _check_remaining(capacity - cost(parts, choice), capacity)
    return choice


def search_equal(parts: Sequence[Candidates], capacity: float) -> KeptUnits:
    """Return the choice of maximum importance in which all parts with the same `counts` keep the same number of units.

    Every combination of counts is tried; the parts with the most counts then keep as many units as fit.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for position, part in enumerate(parts):
        groups.setdefault((part.kind, part.counts), []).append(position)
    options = sorted((_GroupOptions.of(parts, group, counts) for (_, counts), group in groups.items()), key=len)
    *others, last = options
    best, best_value = None, -np.inf
    for picks in itertools.product(*(range(len(group)) for group in others)):
        spent = sum(group.cost[pick] for group, pick in zip(others, picks, strict=True))
        affordable = int(np.searchsorted(last.cost, capacity - spent + 1e-9 * abs(capacity), side="right")) - 1
        if affordable < 0:
            continue
        value = last.value[affordable] + sum(group.value[pick] for group, pick in zip(others, picks, strict=True))
        if value > best_value:
            best, best_value = (*picks, affordable), value
    if best is None:
        _check_remaining(-np.inf, capacity)
    assert best is not None
    kept = {i: group.counts[pick] for group, pick in zip(options, best, strict=True) for i in group.parts}
    return [np.sort(part.ranking()[: kept[i]]) for i, part in enumerate(parts)]


@dataclass(frozen=True)
class _GroupOptions:
    """Parts that keep the same number of units: the possible numbers, with the importance and cost of each."""

    parts: list[int]
    counts: tuple[int, ...]
    value: np.ndarray  # [counts]
    cost: np.ndarray  # [counts]

    @classmethod
    def of(cls, parts: Sequence[Candidates], group: list[int], counts: tuple[int, ...]) -> _GroupOptions:
        least = max(required_count(parts[i]) for i in group)
        allowed = tuple(count for count in counts if count >= least)
        # Standardized scores (FLAP) can be negative, and a further unit must not make a choice worse.
        lowest = min(0.0, *(float(parts[i].importance.min()) for i in group))
        sums = sum(np.cumsum(np.sort(parts[i].importance - lowest)[::-1]) for i in group)
        chosen = np.array(allowed)
        return cls(group, allowed, np.asarray(sums)[chosen - 1], chosen * sum(parts[i].unit_cost for i in group))

    def __len__(self) -> int:
        return len(self.counts)


def search_threshold(parts: Sequence[Candidates], capacity: float) -> KeptUnits:
    """Rank all units globally and remove the least important until the rest fits (FLAP's rule)."""
    owner = np.concatenate([np.full(len(part.importance), i) for i, part in enumerate(parts)])
    unit = np.concatenate([np.arange(len(part.importance)) for part in parts])
    order = np.argsort(np.concatenate([part.importance for part in parts]), kind="stable")
    keep = [np.ones(len(part.importance), dtype=bool) for part in parts]
    excess = sum(part.unit_cost * len(part.importance) for part in parts) - capacity
    for item in order:
        if excess <= 0:
            break
        part, mask = parts[owner[item]], keep[owner[item]]
        if mask.sum() > required_count(part):
            mask[unit[item]] = False
            excess -= part.unit_cost
    _check_remaining(-excess, capacity)
    choice = [np.flatnonzero(mask) for mask in keep]
    return [_round_to_multiple(part, kept) for part, kept in zip(parts, choice, strict=True)]


def _round_to_multiple(part: Candidates, kept: np.ndarray) -> np.ndarray:
    """Keep the best of the kept units, rounded down to a multiple."""
    if len(kept) == len(part.importance):
        return kept
    count = len(kept) // part.multiple * part.multiple
    best = kept[np.argsort(-part.importance[kept], kind="stable")[:count]]
    return np.sort(best)


def required_count(part: Candidates) -> int:
    """Return the number of units kept under any budget: the floor, rounded up to the multiple."""
    rounded = -(-part.min_units // part.multiple) * part.multiple
    return min(rounded, len(part.importance))


def _bundle_importance(part: Candidates, forced: int) -> np.ndarray:
    """Return the importance of each further bundle of `multiple` units, most important first."""
    rest = part.importance[part.ranking()[forced:]]
    starts = np.arange(0, len(rest), part.multiple)
    return np.add.reduceat(rest, starts) if len(rest) else np.zeros(0)


def _search_two_groups(
    groups: list[list[int]], costs: list[float], items: list[np.ndarray], capacity: float
) -> list[int]:
    """Search exactly: for every count of the first group, take as many of the second as fit; the best sum wins."""
    sorted_items = [_merge_bundles(group, items) for group in groups]
    sums = [np.concatenate([[0.0], np.cumsum(values)]) for values, _ in sorted_items]
    if len(groups) == 1:
        best = [_affordable(capacity, costs[0], len(sums[0]) - 1)]
    else:
        first = np.arange(len(sums[0]))
        remaining = capacity - first * costs[0]
        second = np.minimum(np.floor(remaining / costs[1] + 1e-9), len(sums[1]) - 1).astype(int)
        value = np.where(remaining >= 0, sums[0] + sums[1][np.maximum(second, 0)], -np.inf)
        top = int(value.argmax())
        best = [top, int(second[top])]
    counts = [0] * len(items)
    for (_, owners), count in zip(sorted_items, best, strict=True):
        for owner in owners[:count]:
            counts[owner] += 1
    return counts


def _merge_bundles(group: list[int], items: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return all bundles of a group in descending order of importance, and the part each belongs to."""
    values = np.concatenate([items[i] for i in group])
    owners = np.concatenate([np.full(len(items[i]), i) for i in group])
    order = np.argsort(-values, kind="stable")
    return values[order], owners[order]


def _affordable(capacity: float, cost: float, limit: int) -> int:
    return min(limit, int(np.floor(capacity / cost + 1e-9)))


def _by_density(parts: Sequence[Candidates], items: list[np.ndarray], capacity: float) -> list[int]:
    density = np.concatenate([items[i] / (part.unit_cost * part.multiple) for i, part in enumerate(parts)])
    owners = np.concatenate([np.full(len(items[i]), i) for i in range(len(parts))])
    counts, remaining = [0] * len(parts), capacity
    for item in np.argsort(-density, kind="stable"):
        owner = int(owners[item])
        cost = parts[owner].unit_cost * parts[owner].multiple
        if cost <= remaining:
            counts[owner] += 1
            remaining -= cost
    return counts


def _fraction_of_units(part: Candidates, fraction: float, *, up: bool) -> int:
    """Return a fraction of a part's units: rounded to nearest for heads, down for the rest, at least the floor."""
    units = len(part.importance)
    count = int(np.floor(units * fraction + 0.5)) if up else int(np.floor(units * fraction + 1e-9))
    if part.counts:
        allowed = [number for number in part.counts if number >= required_count(part)]
        return max((number for number in allowed if number <= count), default=allowed[0])
    count = count // part.multiple * part.multiple
    return min(units, max(count, required_count(part)))


def _check_remaining(remaining: float, capacity: float) -> None:
    if remaining < -1e-9 * max(abs(capacity), 1.0):
        raise BudgetError(
            "the budget cannot be met: what must be kept (norms, biases, protected units) already costs more; "
            "allow more, or raise `max_sparsity`."
        )
