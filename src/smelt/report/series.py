"""Several series in one graph, as inline SVG: each has a colour and a dash, and its name stands in the key.

Positions along the page are percentages, as in `graphs.py`; axes may be logarithmic and need not begin at zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from smelt.report import numbers
from smelt.report.charts import tick_text, ticks_between
from smelt.report.graphs import Point
from smelt.report.markup import Markup, join, tag

STYLES = 6  # colours and dashes, before they begin anew
_HEIGHT = 190  # of the drawing; the numbers and the name of the lower axis come below it
_FINE = 10_000  # steps of the box in which lines are drawn
_MOST_POINTS = 400


@dataclass(frozen=True)
class Series:
    """Points in the order of their first numbers."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Scale:
    """An axis: from which value to which, and how its numbers are spaced and written."""

    name: str
    first: float
    last: float
    logarithmic: bool = False
    bytes: bool = False

    def place(self, value: float) -> float:
        if self.logarithmic:
            low, high, value = (math.log10(max(each, 1e-300)) for each in (self.first, self.last, value))
        else:
            low, high = self.first, self.last
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        if self.logarithmic:
            powers = range(math.ceil(math.log10(self.first)), math.floor(math.log10(self.last)) + 1)
            return [(10.0**power, self._power(power)) for power in powers]
        values = ticks_between(self.first, self.last)
        return [(value, numbers.size(value) if self.bytes and value else tick_text(value, values)) for value in values]

    def _power(self, power: int) -> str:
        return numbers.size(10.0**power) if self.bytes else f"{10.0**power:g}"


def scale_of(
    name: str, values: Sequence[float], *, zero: bool = False, wide: float = math.inf, bytes: bool = False
) -> Scale:
    """The scale that holds all values; logarithmic where the largest is more than `wide` times the smallest."""
    found = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(found), max(found)
    if low > 0 and high / low > wide:
        return Scale(name, 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)), True, bytes)
    low = 0.0 if zero and low >= 0 else low - 0.05 * (high - low)
    high = high + 0.05 * (high - low)
    return Scale(name, low, high if high > low else low + (abs(low) or 1.0), False, bytes)


def thinned(points: Sequence[Point]) -> tuple[list[Point], int]:
    """Of very many points the means of each so many, and how many that is."""
    every = -(-len(points) // _MOST_POINTS) or 1
    groups = [points[start : start + every] for start in range(0, len(points), every)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups], every


def lines(title: str, series: Sequence[Series], x: Scale, y: Scale) -> Markup:
    """A line through the points of each series."""
    drawn = [
        tag(
            "polyline", tag("title", each.name), points=_places(each.points, x, y), class_=f"curve run{number % STYLES}"
        )
        for number, each in enumerate(series)
        if each.points
    ]
    box = tag("svg", *drawn, viewBox=f"0 0 {_FINE} {_FINE}", preserveAspectRatio="none", width="100%", height=_HEIGHT)
    upright = [(_HEIGHT * (1 - y.place(value)), text) for value, text in y.ticks()]
    grid = [tag("line", x1="0%", x2="100%", y1=f"{at:.1f}", y2=f"{at:.1f}", class_="axis") for at, _ in upright]
    words = [tag("text", text, x="44", y=f"{at + 4:.1f}", text_anchor="end") for at, text in upright]
    below = [
        tag("text", text, x=f"{100 * x.place(value):.2f}%", y=_HEIGHT + 16, text_anchor="middle")
        for value, text in x.ticks()
    ]
    name = tag("text", x.name, x="100%", y=_HEIGHT + 32, text_anchor="end")
    size = {"height": _HEIGHT + 38, "class_": "plot"}
    return tag(
        "div",
        tag("h3", f"{title}, {y.name}" if y.name else title),
        tag("svg", *words, width=52, aria_hidden="true", **size),
        tag("svg", tag("title", title), *grid, box, *below, name, width="100%", role="img", **size),
        class_="graph",
    )


def key_of(names: Sequence[str]) -> Markup:
    """Which line is which."""
    entries = [
        tag(
            "span",
            tag("svg", tag("line", x1=0, x2=28, y1=6, y2=6, class_=f"curve run{number % STYLES}"), width=30, height=12),
            name,
            class_="entry",
        )
        for number, name in enumerate(names)
    ]
    return tag("p", *entries, class_="soft runs")


def stacked(parts: Sequence[tuple[str, float]], longest: float) -> Markup:
    """One bar of several parts, on a scale that ends at `longest`."""
    drawn, start = [], 0.0
    for number, (name, value) in enumerate(parts):
        at, width = 100 * start / longest, 100 * value / longest
        title = tag("title", f"{name}: {1000 * value:.3g} ms")
        drawn.append(tag("rect", title, x=f"{at:.2f}%", y=2, width=f"{width:.2f}%", height=18, class_=f"part{number}"))
        start += value
    return tag("svg", join(*drawn), width="100%", height=22, role="img")


def _places(points: Sequence[Point], x: Scale, y: Scale) -> str:
    return " ".join(f"{_FINE * x.place(one):.0f},{_FINE * (1 - y.place(two)):.0f}" for one, two in points)
