"""Latency search: never worse than without dropped layers, and within the measured latency table."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from smelt.compression.allocation import latency_search
from smelt.compression.allocation.latency_search import LatencyTables, search_latency, search_under_latency
from smelt.compression.allocation.unit_search import Candidates, kept_importance
from smelt.errors import BudgetError, RecipeError
from smelt.measure.cost import Workload
from smelt.models.anatomy_builder import anatomy_of
from smelt.targets.operators import AttentionOp, FeedForwardOp
from smelt.targets.table import LatencyTable
from tests.tiny import BUILDS


def table(kind: str, seconds: list[float]) -> LatencyTable:
    units = len(seconds)
    operator = AttentionOp(64, units, units, 8, 16) if kind == "heads" else FeedForwardOp(64, units, False, 16)
    return LatencyTable("test", operator, tuple(range(1, units + 1)), tuple(seconds))


def staircase(units: int, flat: int, start: float, slope: float) -> list[float]:
    return [start + slope * max(0, k - flat) for k in range(1, units + 1)]


def parts(seed: int, layers: int, heads: int = 6, filters: int = 16, min_units: int = 0) -> list[Candidates]:
    generator = np.random.default_rng(seed)
    return [
        Candidates(kind, generator.exponential(size=units) * generator.exponential(), 0.0, min_units)
        for _ in range(layers)
        for kind, units in (("heads", heads), ("ffn_channels", filters))
    ]


TABLES = LatencyTables(table("heads", staircase(6, 2, 1.0, 0.5)), table("ffn_channels", staircase(16, 4, 1.5, 0.25)))


@pytest.mark.parametrize("keep", [0.9, 0.6, 0.4, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_the_table_is_respected_and_dropping_layers_never_hurts(seed: int, keep: float) -> None:
    candidates = parts(seed, layers=4)
    choice = search_latency(candidates, TABLES, keep)
    full = TABLES.seconds(candidates, [np.arange(len(c.importance)) for c in candidates])
    assert TABLES.seconds(candidates, choice) <= keep * full + 1e-12
    protected = parts(seed, layers=4, min_units=1)  # no layer may be dropped: the (0, 0) solution
    try:
        undropped = kept_importance(protected, search_latency(protected, TABLES, keep))
    except BudgetError:
        assert keep == 0.2  # four layers' constants alone cost more: only dropping layers helps
        return
    assert kept_importance(candidates, choice) >= undropped - 1e-9


def test_a_flat_table_makes_units_free() -> None:
    flat = LatencyTables(table("heads", [1.0] * 6), table("ffn_channels", [2.0] * 16))
    candidates = parts(0, layers=4)
    choice = search_latency(candidates, flat, 0.7)
    assert all(len(kept) in (0, len(c.importance)) for kept, c in zip(choice, candidates, strict=True))
    assert 0 < sum(len(kept) == 0 for kept in choice) < 8


def test_a_nonlinear_table_is_met_although_the_search_fits_a_line() -> None:
    wobble = np.random.default_rng(0).normal(scale=0.3, size=16)
    seconds = np.maximum(0.5, np.array(staircase(16, 4, 1.5, 0.25)) + wobble)
    tables = LatencyTables(TABLES.heads, table("ffn_channels", seconds.tolist()))
    candidates = parts(3, layers=6)
    full = tables.seconds(candidates, [np.arange(len(c.importance)) for c in candidates])
    assert tables.seconds(candidates, search_latency(candidates, tables, 0.5)) <= 0.5 * full


def test_an_impossible_latency_is_refused() -> None:
    with pytest.raises(BudgetError, match="cannot be met"):
        search_latency(parts(0, layers=2, min_units=1), TABLES, 0.05)


def test_with_no_layer_to_drop_the_search_equals_brute_force() -> None:
    keep = 0.83
    tables = LatencyTables(TABLES.heads, table("ffn_channels", staircase(8, 2, 1.5, 0.25)))
    for seed in range(3):
        candidates = [replace(part, min_units=3) for part in parts(seed, layers=2, filters=8)]
        limit = keep * tables.seconds(candidates, [np.arange(len(part.importance)) for part in candidates])
        best = 0.0
        for counts in itertools.product(*(range(part.min_units, len(part.importance) + 1) for part in candidates)):
            choice = [part.ranking()[:count] for part, count in zip(candidates, counts, strict=True)]
            if tables.seconds(candidates, choice) <= limit:
                best = max(best, kept_importance(candidates, choice))
        assert kept_importance(candidates, search_latency(candidates, tables, keep)) == pytest.approx(best)


@pytest.mark.parametrize("keep", [0.6, 0.75, 0.9])
def test_a_minimum_that_is_met_anyway_changes_nothing(keep: float) -> None:
    """It is above the units that cost nothing, so that it uses up a part of the budget."""
    tables = LatencyTables(TABLES.heads, table("ffn_channels", staircase(300, 40, 1.5, 0.02)))
    candidates = parts(4, layers=3, filters=300, min_units=1)
    expected = search_latency(candidates, tables, keep)
    required = [replace(part, min_units=len(kept)) for part, kept in zip(candidates, expected, strict=True)]
    required[-1] = candidates[-1]
    for kept, other in zip(expected, search_latency(required, tables, keep), strict=True):
        np.testing.assert_array_equal(kept, other)


def test_a_protected_layer_stays_although_it_is_the_least_important() -> None:
    candidates = parts(6, layers=4)
    candidates[2] = replace(candidates[2], importance=candidates[2].importance / 1e6, min_units=1)
    choice = search_latency(candidates, TABLES, 0.25)
    assert len(choice[2]) >= 1 and any(len(kept) == 0 for kept in choice)


def test_the_unit_of_time_does_not_matter() -> None:
    candidates = parts(1, layers=4)
    heads, ffn_channels = staircase(6, 2, 1 / 1024, 0.5 / 1024), staircase(16, 4, 1.5 / 1024, 0.25 / 1024)
    milliseconds = LatencyTables(table("heads", heads), table("ffn_channels", ffn_channels))
    expected = search_latency(candidates, TABLES, 0.6)
    for kept, other in zip(expected, search_latency(candidates, milliseconds, 0.6), strict=True):
        np.testing.assert_array_equal(kept, other)


def test_a_network_of_attention_and_ffn_layers_is_searched_and_convolutions_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latency_search, "measure_latency_tables", lambda *_: TABLES)
    candidates = parts(2, layers=3)
    choice = search_under_latency(anatomy_of(BUILDS["llama"]()), candidates, 0.6, Workload(), seed=0)
    for kept, other in zip(choice, search_latency(candidates, TABLES, 0.6), strict=True):
        np.testing.assert_array_equal(kept, other)
    with pytest.raises(RecipeError, match="for convolutions use macs"):
        search_under_latency(anatomy_of(BUILDS["resnet"]()), candidates, 0.6, Workload(), seed=0)
