"""The search equals brute force on small cases, meets its budget, and respects floors and multiples."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt.compression.allocation.unit_search import (
    Candidates,
    KeptUnits,
    cost,
    kept_importance,
    search,
    search_equal,
    search_threshold,
    search_uniform,
)
from smelt.errors import BudgetError

Rule = Callable[[list[Candidates], float], KeptUnits]


def brute_force(parts: list[Candidates], capacity: float) -> float:
    """Return the best total importance over all allowed counts; for each count a part keeps its top units."""
    options = []
    for part in parts:
        units = len(part.importance)
        floor = min(units, -(-part.min_units // part.multiple) * part.multiple)
        counts = [k for k in range(units + 1) if k >= floor and ((k - floor) % part.multiple == 0 or k == units)]
        sums = np.concatenate([[0.0], np.cumsum(np.sort(part.importance)[::-1])])
        options.append([(k * part.unit_cost, sums[k]) for k in counts])
    best = -np.inf
    for combination in itertools.product(*options):
        if sum(price for price, _ in combination) <= capacity + 1e-9:
            best = max(best, sum(value for _, value in combination))
    return best


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Candidates], float]:
    unit_costs = {"heads": draw(st.integers(3, 40)), "ffn_channels": draw(st.integers(1, 6))}
    multiple = draw(st.sampled_from([1, 1, 2]))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        for kind in ("heads", "ffn_channels"):
            units = draw(st.integers(1, 2)) * 2
            values = draw(st.lists(st.floats(0, 100), min_size=units, max_size=units))
            floor = draw(st.integers(0, 1)) if kind == "heads" else 0
            step = multiple if kind == "ffn_channels" else 1
            parts.append(Candidates(kind, np.array(values), float(unit_costs[kind]), floor, step))
    full = sum(part.unit_cost * len(part.importance) for part in parts)
    return parts, full * draw(st.floats(0.05, 1.0))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_search_matches_brute_force(problem: tuple[list[Candidates], float]) -> None:
    parts, capacity = problem
    best = brute_force(parts, capacity)
    if best == -np.inf:
        with pytest.raises(BudgetError):
            search(parts, capacity)
        return
    choice = search(parts, capacity)
    assert cost(parts, choice) <= capacity + 1e-6
    assert kept_importance(parts, choice) == pytest.approx(best, abs=1e-9)
    for part, kept in zip(parts, choice, strict=True):
        assert len(kept) >= part.min_units
        assert list(kept) == sorted(set(kept))


def random_parts(seed: int, layers: int = 4) -> list[Candidates]:
    generator = np.random.default_rng(seed)
    return [
        Candidates(kind, generator.exponential(size=units), price)
        for _ in range(layers)
        for kind, units, price in (("heads", 8, 100.0), ("ffn_channels", 64, 7.0))
    ]


def test_uniform_takes_the_same_share_of_every_layer_and_meets_the_budget() -> None:
    parts = random_parts(0)
    capacity = 0.7 * sum(part.unit_cost * len(part.importance) for part in parts)
    choice = search_uniform(parts, capacity)
    assert {len(kept) for kept in choice[::2]} == {6} and len({len(kept) for kept in choice[1::2]}) == 1
    assert 0.98 * capacity < cost(parts, choice) <= capacity


@st.composite
def equal_problems(draw: st.DrawFn) -> tuple[list[Candidates], float]:
    layers = draw(st.integers(1, 3))
    parts = []
    for kind, units, counts in (("heads", 4, (1, 2, 4)), ("ffn_channels", 6, (2, 4, 6))):
        for _ in range(layers):
            values = draw(st.lists(st.floats(0, 100), min_size=units, max_size=units))
            cost = 7.0 if kind == "heads" else 3.0
            parts.append(Candidates(kind, np.array(values), cost, draw(st.integers(0, 2)), 1, counts))
    return parts, sum(part.unit_cost * len(part.importance) for part in parts) * draw(st.floats(0.2, 1.0))


@settings(max_examples=200, deadline=None)
@given(equal_problems())
def test_equal_widths_match_brute_force(problem: tuple[list[Candidates], float]) -> None:
    parts, capacity = problem
    best = -np.inf
    for heads, channels in itertools.product((1, 2, 4), (2, 4, 6)):
        numbers = {"heads": heads, "ffn_channels": channels}
        if all(numbers[part.kind] >= part.min_units for part in parts):
            choice = [np.sort(part.ranking()[: numbers[part.kind]]) for part in parts]
            if cost(parts, choice) <= capacity * (1 + 1e-9):  # as the search, which allows for rounding
                best = max(best, kept_importance(parts, choice))
    if best == -np.inf:
        with pytest.raises(BudgetError):
            search_equal(parts, capacity)
        return
    choice = search_equal(parts, capacity)
    assert kept_importance(parts, choice) == pytest.approx(best) and cost(parts, choice) <= capacity * (1 + 1e-9)
    for kind in ("heads", "ffn_channels"):
        assert len({len(kept) for part, kept in zip(parts, choice, strict=True) if part.kind == kind}) == 1


def test_equal_widths_of_negative_scores_still_use_the_budget() -> None:
    parts = [Candidates("ffn_channels", np.array([1.0, 0.0, -1.0, -2.0]), 1.0, 0, 1, (1, 2, 3, 4)) for _ in range(2)]
    assert [len(kept) for kept in search_equal(parts, 6.0)] == [3, 3]


def test_threshold_keeps_the_global_order() -> None:
    parts = random_parts(1)
    capacity = 0.6 * sum(part.unit_cost * len(part.importance) for part in parts)
    choice = search_threshold(parts, capacity)
    kept = np.concatenate([part.importance[k] for part, k in zip(parts, choice, strict=True)])
    gone = np.concatenate([np.delete(part.importance, k) for part, k in zip(parts, choice, strict=True)])
    assert kept.min() >= gone.max() and cost(parts, choice) <= capacity


@pytest.mark.parametrize("rule", [search, search_uniform, search_threshold])
@pytest.mark.parametrize("share", [0.55, 0.7, 0.9])
def test_a_multiple_of_units_is_kept_or_all(rule: Rule, share: float) -> None:
    """Also where the minimum is no multiple: a group size that divides the multiple relies on it."""
    generator = np.random.default_rng(3)
    parts = [Candidates("ffn_channels", generator.random(64), 1.0, min_units=21, multiple=16) for _ in range(6)]
    parts[0] = replace(parts[0], importance=parts[0].importance / 1e3)  # it falls to the minimum
    choice = rule(parts, share * 6 * 64)
    assert all(len(kept) % 16 == 0 and len(kept) >= 21 for kept in choice)
    assert cost(parts, choice) <= share * 6 * 64


def test_more_than_two_costs_stay_within_the_budget() -> None:
    generator = np.random.default_rng(2)
    parts = [Candidates("channels", generator.random(16), float(price), min_units=1) for price in (3, 5, 11, 17)]
    capacity = 0.5 * sum(part.unit_cost * 16 for part in parts)
    choice = search(parts, capacity)
    assert 0.9 * capacity < cost(parts, choice) <= capacity and all(len(kept) >= 1 for kept in choice)


def test_a_budget_below_the_minimum_is_refused() -> None:
    parts = [Candidates("heads", np.ones(4), 10.0, min_units=3)]
    for rule in (search, search_uniform, search_threshold):
        with pytest.raises(BudgetError, match="cannot be met"):
            rule(parts, 20.0)


def test_with_more_than_two_costs_the_most_important_units_per_cost_are_kept() -> None:
    """Without a minimum, a part whose units cost too much may lose all of them."""
    parts = [Candidates("channels", np.ones(8), price) for price in (16.0, 1.0, 4.0)]
    assert [len(kept) for kept in search(parts, 8 * 1.0 + 3 * 4.0)] == [0, 8, 3]
