"""Charts: marks are drawn at the position of their value."""

from __future__ import annotations

import re

import pytest

from smelt.report.charts import Bar, Interval, axis_below, bar, cells, fraction_bar, interval_plot, pair_of_bars
from smelt.report.layers import kept_map


def attribute_values(svg: str, style: str, attribute: str) -> list[float]:
    tags = [tag for tag in re.findall(r"<[^>]*>", svg) if f'class="{style}"' in tag]
    return [float(re.search(rf'{attribute}="([-\d.]+)%"', tag).group(1)) for tag in tags]  # type: ignore[union-attr]


def test_interval_and_reference_share_one_scale() -> None:
    svg = interval_plot(Interval(3.5, 3.0, 4.5, 0.0, higher_is_better=False), "title", "axis")
    (reference,), (dot,) = attribute_values(svg, "reference", "x1"), attribute_values(svg, "estimate", "cx")
    low, high = attribute_values(svg, "interval", "x1")[0], attribute_values(svg, "interval", "x2")[0]
    unit = (high - low) / 1.5
    assert dot == pytest.approx(low + 0.5 * unit, abs=0.1) and reference == pytest.approx(dot - 3.5 * unit, abs=0.1)
    assert 0 < reference < low < dot < high < 100 and reference == pytest.approx(100 - high, abs=0.1)
    ticks = {int(text): float(x) for x, text in re.findall(r'<text x="([\d.]+)%" y="82"[^>]*>(\d+)<', svg)}
    assert ticks and all(x == pytest.approx(reference + value * unit, abs=0.1) for value, x in ticks.items())


@pytest.mark.parametrize(("higher_is_better", "left"), [(True, "← worse"), (False, "← better")])
def test_the_better_side_is_named(higher_is_better: bool, left: str) -> None:
    svg = interval_plot(Interval(0.1, 0.0, 0.2, 0.0, higher_is_better), "title", "axis")
    assert re.search(rf'<text x="0%"[^>]*>{left}</text>', svg)


@pytest.mark.parametrize("value", [0.0, 1e-9, 1.0, 1e12, -5.0])
def test_a_zero_width_interval_is_drawn(value: float) -> None:
    svg = interval_plot(Interval(value, value, value, 0.0, higher_is_better=True), "title", "axis")
    assert "nan" not in svg and 0 <= attribute_values(svg, "estimate", "cx")[0] <= 100


def test_bars_share_their_scale() -> None:
    svg = bar(Bar(50.0, 20.0, "after", "title"), longest=100.0)
    assert attribute_values(svg, "after", "width") == [50.0]
    assert attribute_values(svg, "whisker", "x1") == [40.0, 40.0, 60.0]
    assert attribute_values(svg, "whisker", "x2") == [60.0, 40.0, 60.0]
    assert "whisker" not in bar(Bar(50.0, 0.0, "after", "title"), longest=100.0)


def test_a_pair_of_bars_fills_the_width_with_the_longer_one() -> None:
    svg = pair_of_bars(80.0, 20.0, "title")
    assert attribute_values(svg, "before", "width") == [100.0] and attribute_values(svg, "after", "width") == [25.0]
    assert attribute_values(pair_of_bars(1.0, 4.0, "title"), "before", "width") == [25.0]


@pytest.mark.parametrize("pair", [(0.0, 0.0), (1.0, float("inf")), (float("nan"), 1.0), (-0.5, 0.5)])
def test_values_without_a_scale_get_no_bars(pair: tuple[float, float]) -> None:
    assert pair_of_bars(*pair, "title") == ""


def test_the_axis_of_bars_has_their_scale_and_a_title() -> None:
    svg = axis_below(250.0, "milli<seconds")
    ticks = {int(text): float(x) for x, text in re.findall(r'<text x="([\d.]+)%" y="19"[^>]*>(\d+)<', svg)}
    assert len(ticks) >= 3 and all(x == pytest.approx(value / 2.5) for value, x in ticks.items())
    assert ">milli&lt;seconds</text>" in svg


def test_kept_fraction_fills_the_track() -> None:
    svg = fraction_bar(0.25, "a quarter")
    assert attribute_values(svg, "kept", "width") == [25.0] and "<title>a quarter</title>" in svg


def test_a_widened_layer_fills_the_track_and_says_how_wide_it_was() -> None:
    block = {"block": 0, "channels": [{"of": 16, "kept": 28}, {"of": 16, "kept": 8}]}
    svg = kept_map([block])
    assert attribute_values(svg, "kept", "width") == [100.0, 50.0]
    assert "<title>28 channels, 16 before (175 %)</title>" in svg and "8 of 16 channels kept (50 %)" in svg


def test_cells_keep_their_positions() -> None:
    svg = cells({0, 2}, 4, "head")
    assert attribute_values(svg, "cell kept", "x") == pytest.approx([1.5, 51.5])
    assert attribute_values(svg, "cell removed", "x") == pytest.approx([26.5, 76.5])
    assert attribute_values(svg, "cell kept", "width") == pytest.approx([22.0, 22.0]), "cells do not overlap"
