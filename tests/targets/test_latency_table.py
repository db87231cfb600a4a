"""The latency table: measured in shuffled rounds, stored as JSON, fitted as in the paper."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from smelt.errors import DataError
from smelt.targets.device import Device
from smelt.targets.operators import AttentionOp, FeedForwardOp, Operator
from smelt.targets.table import LatencyTable, fit_piecewise, measure_table, sample_widths, table_key


class Imagined:
    """A target whose latency is a function of the width and the number of calls."""

    name = "imagined"

    def __init__(self, formula: Callable[[int, int], float]) -> None:
        self.formula = formula
        self.asked: list[int] = []

    def latency(self, operator: Operator) -> float:
        assert isinstance(operator, FeedForwardOp)
        self.asked.append(operator.ffn_channels)
        return self.formula(operator.ffn_channels, len(self.asked))

    def fits(self, size: int) -> bool:
        return True


def filters(count: int) -> FeedForwardOp:
    return FeedForwardOp(hidden=8, ffn_channels=count, gated=False, tokens=4, batch=2)


def table_of(latencies: list[float] | np.ndarray) -> LatencyTable:
    return LatencyTable("imagined", filters(len(latencies)), tuple(range(1, len(latencies) + 1)), tuple(latencies))


def test_widths_include_both_ends() -> None:
    assert sample_widths(4) == [1, 2, 3, 4]
    assert sample_widths(200, step=64) == [1, 64, 128, 192, 200]
    assert sample_widths(1, step=64) == [1]


def test_steps_are_kept_and_gaps_are_interpolated() -> None:
    target = Imagined(lambda width, asked: float(-(-width // 8)))
    table = measure_table(target, filters, [1, 8, 9, 16])
    assert table.seconds.shape == (17,) and table.seconds[0] == 0.0
    assert table.seconds[[1, 8, 9, 16]].tolist() == [1, 1, 2, 2]
    assert measure_table(target, filters, [1, 11]).seconds[6] == pytest.approx(1.5)


def test_a_dip_is_not_smoothed_away() -> None:
    table = measure_table(Imagined(lambda width, asked: {1: 1.0, 2: 3.0, 3: 2.0}[width]), filters, [1, 2, 3])
    assert table.seconds.tolist() == [0, 1, 3, 2]


def test_rounds_differ_in_order_and_cover_every_width() -> None:
    target = Imagined(lambda width, asked: float(width))
    measure_table(target, filters, range(1, 11), rounds=4)
    rounds = [target.asked[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(order) == list(range(1, 11)) for order in rounds)
    assert len({tuple(order) for order in rounds}) == 4 and list(range(1, 11)) not in rounds


def test_a_temporary_slowdown_does_not_affect_the_table() -> None:
    target = Imagined(lambda width, asked: width * (10.0 if 21 <= asked <= 40 else 1.0))
    table = measure_table(target, filters, range(1, 11), rounds=5)
    assert table.seconds.tolist() == list(range(11))


def test_time_is_bounded_even_in_the_first_round() -> None:
    def slow(width: int, asked: int) -> float:
        time.sleep(0.02)
        return float(width)

    target = Imagined(slow)
    table = measure_table(target, filters, range(1, 101), seconds=0.1)
    assert len(target.asked) < 10
    assert table.widths[0] == 1 and table.widths[-1] == 100
    assert table.seconds == pytest.approx(np.arange(101.0))
    target = Imagined(slow)
    assert measure_table(target, filters, range(1, 101), seconds=0.0).widths == (1, 100)


def test_a_real_device_gives_a_table() -> None:
    def heads(count: int) -> AttentionOp:
        return AttentionOp(hidden=64, heads=count, kv_heads=count, head_dim=16, tokens=32)

    table = measure_table(Device("cpu"), heads, sample_widths(4), seconds=2.0)
    assert table.seconds.shape == (5,) and (table.seconds[1:] > 0).all()
    assert table.key == table_key(Device("cpu").name, heads(4)) and "tokens=32" in table.key


def test_the_table_round_trips_through_json(tmp_path: Path) -> None:
    attention = AttentionOp(hidden=64, heads=8, kv_heads=2, head_dim=16, tokens=32, causal=True, dtype="bfloat16")
    for table in (table_of([0.1, 0.30000000000000004]), LatencyTable("gpu", attention, (1, 2), (1e-5, 2e-5))):
        assert LatencyTable.from_json(table.to_json()) == table
        table.save(tmp_path / "table.json")
        assert LatencyTable.load(tmp_path / "table.json") == table
        assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


GOOD = json.loads(table_of([0.1, 0.2]).to_json())
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        DEEP,
        json.dumps({**GOOD, "format": 99}),
        json.dumps({**GOOD, "more": 1}),
        json.dumps({**GOOD, "target": 7}),
        json.dumps({**GOOD, "widths": [2, 1]}),
        json.dumps({**GOOD, "widths": [0, 1]}),
        json.dumps({**GOOD, "widths": [1, 10**15]}),
        json.dumps({**GOOD, "widths": [1, True]}),
        json.dumps({**GOOD, "widths": [1]}),
        json.dumps({**GOOD, "widths": [], "seconds": []}),
        json.dumps({**GOOD, "seconds": [0.1, float("nan")]}),
        json.dumps({**GOOD, "seconds": [0.1, -0.2]}),
        json.dumps({**GOOD, "seconds": [0.1, "0.2"]}),
        json.dumps({**GOOD, "operator": None}),
        json.dumps({**GOOD, "operator": {"kind": "object"}}),
        json.dumps({**GOOD, "operator": {**GOOD["operator"], "hidden": "8"}}),
        json.dumps({**GOOD, "operator": {**GOOD["operator"], "hidden": -8}}),
        json.dumps({**GOOD, "operator": {**GOOD["operator"], "extra": 8}}),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="measure it again"):
        LatencyTable.from_json(text)


def test_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("binary", "missing"):
        with pytest.raises(DataError):
            LatencyTable.load(tmp_path / name)


def test_fit_of_an_exact_line_is_exact() -> None:
    line = fit_piecewise(table_of([1.0] * 4 + [1 + 0.25 * k for k in range(1, 9)]))
    assert (line.threshold, line.constant, line.slope, line.error) == (4, 1.0, 0.25, 0.0)
    assert [line.seconds(units) for units in (0, 1, 4, 5, 12)] == [0.0, 1.0, 1.0, 1.25, 3.0]


def test_fit_never_slopes_down_and_accepts_flat_tables() -> None:
    assert fit_piecewise(table_of([3.0, 2.0, 1.0])).slope == 0.0
    flat = fit_piecewise(table_of([2.0] * 6))
    assert (flat.constant, flat.slope, flat.error) == (2.0, 0.0, 0.0)
    single = fit_piecewise(table_of([0.5]))
    assert (single.threshold, single.constant, single.slope) == (1, 0.5, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_fit_matches_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    latencies = np.cumsum(random.random(12)) + 2
    line = fit_piecewise(table_of(latencies))

    def error(threshold: int, slope: float) -> float:
        constant = latencies[:threshold].mean()
        units = np.arange(1, 13)
        return float(((constant + slope * np.maximum(0, units - threshold) - latencies) ** 2).sum())

    assert line.error == pytest.approx(error(line.threshold, line.slope))
    grid = itertools.product(range(1, 13), np.linspace(0, 2, 401))
    assert line.error <= min(error(threshold, slope) for threshold, slope in grid) + 1e-12


def test_fit_of_a_wide_table_is_fast() -> None:
    table = table_of(np.random.default_rng(0).random(3072) + np.arange(3072) / 1000)
    start = time.perf_counter()
    fit_piecewise(table)
    assert time.perf_counter() - start < 1.0
