"""Plots: points are drawn at their values, and no text of a run becomes markup."""

from __future__ import annotations

import re

import pytest

from smelt.report.plots import Axis, curve, dots, steps


def polyline_points(svg: str) -> list[tuple[float, float]]:
    (points,) = re.findall(r'points="([^"]*)"', svg)
    return [(float(x) / 10_000, 1 - float(y) / 10_000) for x, y in (pair.split(",") for pair in points.split())]


def test_a_curve_goes_through_its_points() -> None:
    svg = curve("title", [(0.0, 0.0), (5.0, 1.0), (20.0, 4.0)], Axis("s", 20.0), Axis("ms", 8.0))
    assert polyline_points(svg) == [(0.0, 0.0), (0.25, 0.125), (1.0, 0.5)]
    assert "<h3>title</h3>" in svg and '<div class="axis-title y-title">ms</div>' in svg
    assert re.search(r'class="axis-title">s</text>', svg)


def test_steps_keep_their_value() -> None:
    svg = steps("title", [(0.0, 2.0), (1.0, 4.0), (2.0, 0.0)], Axis("s", 2.0), Axis("", 4.0))
    assert polyline_points(svg) == [(0.0, 0.5), (0.5, 0.5), (0.5, 1.0), (1.0, 1.0), (1.0, 0.0)]
    assert "<h3>title</h3>" in svg


def test_points_and_markers() -> None:
    svg = dots("title", [(5.0, 25.0)], Axis("s", 10.0), Axis("ms", 100.0, mark=50.0, mark_name="limit"))
    assert 'cx="50.00%"' in svg and 'cy="127.5"' in svg  # a quarter of 170 from the bottom
    assert re.search(r'<line x1="0%" x2="100%" y1="85.0" y2="85.0" class="reference"', svg) and ">limit<" in svg
    assert "reference" not in dots("title", [(5.0, 25.0)], Axis("s", 10.0), Axis("ms", 100.0, mark=500.0))
    assert dots("t", [(float(i), 1.0) for i in range(4000)], Axis("s", 4000.0), Axis("", 1.0)).count("<circle") <= 1500


@pytest.mark.parametrize("top", [0.0, 1e-9, 1e12])
def test_any_range_is_plotted(top: float) -> None:
    svg = curve("<b>", [(0.0, 0.0), (top, top)], Axis("s", top), Axis("ms", top))
    assert "nan" not in svg and "inf" not in svg and "<b>" not in svg
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in polyline_points(svg))
