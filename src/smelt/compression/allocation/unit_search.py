"""Choose the units to keep under a budget: by exact search, by one ratio for all layers, or by a global threshold.

The exact search (Kwon et al., 2022): all heads cost the same and so do all FFN channels, so for every number of heads,
the best heads and the best channels that still fit are prefixes of two sorted lists, and the best pair wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smelt.errors import BudgetError


@dataclass(frozen=True)
class Candidates:
    """The units of one part: their importance, price, and constraints on how many are kept."""

    kind: str
    importance: np.ndarray  # [units]
    price: float
    floor: int = 0  # minimum number of units to keep
    multiple: int = 1  # the number kept is a multiple of this, or all

    def ranking(self) -> np.ndarray:
        """Return units from most to least important; ties by index, so that the choice is deterministic."""
        return np.argsort(-self.importance, kind="stable")


KeptUnits = list[np.ndarray]  # the indices kept in each part, ascending


def cost(parts: Sequence[Candidates], choice: KeptUnits) -> float:
    return sum(part.price * len(kept) for part, kept in zip(parts, choice, strict=True))


def kept_importance(parts: Sequence[Candidates], choice: KeptUnits) -> float:
    return float(sum(part.importance[kept].sum() for part, kept in zip(parts, choice, strict=True)))


def search(parts: Sequence[Candidates], capacity: float) -> KeptUnits:
    """Return the choice of maximum importance that costs at most `capacity`.

    Exact for two prices (heads and FFN channels). With more prices (convolutions), greedy by importance per price.
    """
    forced = [forced_count(part) for part in parts]
    remaining = capacity - sum(part.price * count for part, count in zip(parts, forced, strict=True))
    _check_floor(remaining, capacity)
    items = [_items(part, count) for part, count in zip(parts, forced, strict=True)]
    groups: dict[tuple[str, float], list[int]] = {}
    for position, part in enumerate(parts):
        groups.setdefault((part.kind, part.price * part.multiple), []).append(position)
    if len(groups) <= 2:
        bundles = _two_prefixes(list(groups.values()), [price for _, price in groups], items, remaining)
    else:
        bundles = _by_density(parts, items, remaining)
    return [
        np.sort(part.ranking()[: min(count + extra * part.multiple, len(part.importance))])
        for part, count, extra in zip(parts, forced, bundles, strict=True)
    ]


def search_uniform(parts: Sequence[Candidates], capacity: float) -> KeptUnits:
    """Keep the same fraction of every layer: heads first, to the nearest count, then channels within the remainder."""
    full = sum(part.price * len(part.importance) for part in parts)
    share = min(1.0, max(0.0, capacity / full))
    counts = [_rounded(part, share, up=part.kind == "heads") for part in parts]
    flexible = [i for i, part in enumerate(parts) if part.kind != "heads"]
    spent = sum(parts[i].price * counts[i] for i in range(len(parts)) if i not in flexible)
    remaining = capacity - spent
    full_flexible = sum(parts[i].price * len(parts[i].importance) for i in flexible)
    if flexible:
        share = min(1.0, remaining / full_flexible)
        for i in flexible:
            counts[i] = _rounded(parts[i], share, up=False)
    choice = [np.sort(part.ranking()[:count]) for part, count in zip(parts, counts, strict=True)]
    _check_floor(capacity - cost(parts, choice), capacity)
    return choice


def search_threshold(parts: Sequence[Candidates], capacity: float) -> KeptUnits:
    """Rank all units globally and remove the least important until the rest fits (FLAP's rule)."""
    owner = np.concatenate([np.full(len(part.importance), i) for i, part in enumerate(parts)])
    unit = np.concatenate([np.arange(len(part.importance)) for part in parts])
    order = np.argsort(np.concatenate([part.importance for part in parts]), kind="stable")
    keep = [np.ones(len(part.importance), dtype=bool) for part in parts]
    excess = sum(part.price * len(part.importance) for part in parts) - capacity
    for item in order:
        if excess <= 0:
            break
        part, mask = parts[owner[item]], keep[owner[item]]
        if mask.sum() > part.floor:
            mask[unit[item]] = False
            excess -= part.price
    _check_floor(-excess, capacity)
    choice = [np.flatnonzero(mask) for mask in keep]
    return [_whole_bundles(part, kept) for part, kept in zip(parts, choice, strict=True)]


def _whole_bundles(part: Candidates, kept: np.ndarray) -> np.ndarray:
    """Keep the best of the kept units, rounded down to a multiple."""
    if len(kept) == len(part.importance):
        return kept
    count = max(len(kept) // part.multiple * part.multiple, min(forced_count(part), len(kept)))
    best = kept[np.argsort(-part.importance[kept], kind="stable")[:count]]
    return np.sort(best)


def forced_count(part: Candidates) -> int:
    """Return the number of units kept under any budget: the floor, rounded up to the multiple."""
    rounded = -(-part.floor // part.multiple) * part.multiple
    return min(rounded, len(part.importance))


def _items(part: Candidates, forced: int) -> np.ndarray:
    """Return the importance of each further bundle of `multiple` units, most important first."""
    rest = part.importance[part.ranking()[forced:]]
    starts = np.arange(0, len(rest), part.multiple)
    return np.add.reduceat(rest, starts) if len(rest) else np.zeros(0)


def _two_prefixes(groups: list[list[int]], prices: list[float], items: list[np.ndarray], capacity: float) -> list[int]:
    """Search exactly: for every count of the first group, take as many of the second as fit; the best sum wins."""
    sorted_items = [_merged(group, items) for group in groups]
    sums = [np.concatenate([[0.0], np.cumsum(values)]) for values, _ in sorted_items]
    if len(groups) == 1:
        best = [_affordable(capacity, prices[0], len(sums[0]) - 1)]
    else:
        first = np.arange(len(sums[0]))
        remaining = capacity - first * prices[0]
        second = np.minimum(np.floor(remaining / prices[1] + 1e-9), len(sums[1]) - 1).astype(int)
        value = np.where(remaining >= 0, sums[0] + sums[1][np.maximum(second, 0)], -np.inf)
        top = int(value.argmax())
        best = [top, int(second[top])]
    taken = [0] * len(items)
    for (_, owners), count in zip(sorted_items, best, strict=True):
        for owner in owners[:count]:
            taken[owner] += 1
    return taken


def _merged(group: list[int], items: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return all bundles of a group in descending order of importance, and the part each belongs to."""
    values = np.concatenate([items[i] for i in group])
    owners = np.concatenate([np.full(len(items[i]), i) for i in group])
    order = np.argsort(-values, kind="stable")
    return values[order], owners[order]


def _affordable(capacity: float, price: float, most: int) -> int:
    return min(most, int(np.floor(capacity / price + 1e-9)))


def _by_density(parts: Sequence[Candidates], items: list[np.ndarray], capacity: float) -> list[int]:
    density = np.concatenate([items[i] / (part.price * part.multiple) for i, part in enumerate(parts)])
    owners = np.concatenate([np.full(len(items[i]), i) for i in range(len(parts))])
    taken, remaining = [0] * len(parts), capacity
    for item in np.argsort(-density, kind="stable"):
        owner = int(owners[item])
        price = parts[owner].price * parts[owner].multiple
        if price <= remaining:
            taken[owner] += 1
            remaining -= price
    return taken


def _rounded(part: Candidates, share: float, *, up: bool) -> int:
    """Return a fraction of a part's units: rounded to nearest for heads, down for the rest, at least the floor."""
    units = len(part.importance)
    count = int(np.floor(units * share + 0.5)) if up else int(np.floor(units * share + 1e-9))
    count = count // part.multiple * part.multiple
    return min(units, max(count, forced_count(part)))


def _check_floor(left: float, capacity: float) -> None:
    if left < -1e-9 * max(abs(capacity), 1.0):
        raise BudgetError(
            "the budget cannot be met: what must be kept (norms, biases, protected units) already costs more; "
            "allow more, or raise `max_sparsity`."
        )
