"""Latency search: never worse than without dropped layers, and within the measured latency table."""

from __future__ import annotations

import numpy as np
import pytest

from smelt.compression.allocation.latency_search import LatencyTables, search_latency
from smelt.compression.allocation.unit_search import Candidates, kept_importance
from smelt.errors import BudgetError
from smelt.targets.operators import AttentionOp, FeedForwardOp
from smelt.targets.table import LatencyTable


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
