"""Plots over two axes as inline SVG: one curve, steps or dots, or several lines with a legend and optional log axes.

The drawing stretches with the page while text and lines keep their size: horizontal positions are percentages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from smelt.report import numbers
from smelt.report.charts import tick_text, ticks_between
from smelt.report.markup import Markup, join, tag

_HEIGHT = 170  # of the plot area; tick labels and the axis title are below it
_MAX_DOTS = 1500
_RESOLUTION = 10_000  # of the view box in which lines are drawn

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """An axis from zero to `top`, with its title; `mark` is a value drawn as a reference line with its name."""

    name: str
    top: float
    mark: float | None = None
    mark_name: str = ""

    @property
    def end(self) -> float:
        return self.top if self.top > 0 else 1.0

    def position(self, value: float) -> float:
        return min(max(value / self.end, 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Return value and label of each tick."""
        values = ticks_between(0, self.end)
        return [(value, tick_text(value, values)) for value in values]


def curve(title: str, points: Sequence[Point], x: Axis, y: Axis) -> Markup:
    """Draw a line through the points."""
    return _graph(title, x, y, _line(points, x, y))


def steps(title: str, points: Sequence[Point], x: Axis, y: Axis) -> Markup:
    """Draw a step function: each value holds until the next point."""
    corners: list[Point] = []
    for position, value in points:
        corners += [(position, corners[-1][1]), (position, value)] if corners else [(position, value)]
    return _graph(title, x, y, _line(corners, x, y))


def dots(title: str, points: Sequence[Point], x: Axis, y: Axis) -> Markup:
    """Draw a dot per point, subsampled if there are very many."""
    stride = -(-len(points) // _MAX_DOTS) or 1
    circles = [
        tag("circle", cx=_percent(x.position(px)), cy=f"{_HEIGHT * (1 - y.position(py)):.1f}", r=2.5, class_="spot")
        for px, py in points[::stride]
    ]
    return _graph(title, x, y, join(*circles))


def _line(points: Sequence[Point], x: Axis, y: Axis) -> Markup:
    return tag(
        "svg",
        tag("polyline", points=_coordinates(points, x, y), class_="curve"),
        viewBox=f"0 0 {_RESOLUTION} {_RESOLUTION}",
        preserveAspectRatio="none",
        width="100%",
        height=_HEIGHT,
    )


def _graph(title: str, x: Axis, y: Axis, content: Markup) -> Markup:
    return _frame(title, x, y, join(_marks(x, y), content), _HEIGHT)


def _frame(title: str, x: Axis | Scale, y: Axis | Scale, content: Markup, height: int) -> Markup:
    """Draw content between two axes with their titles; the y labels have a box of their own, whose width does not
    change with the page."""
    heights = [(height * (1 - y.position(value)), text) for value, text in y.ticks()]
    labels = [tag("text", text, x="44", y=f"{place + 4:.1f}", text_anchor="end") for place, text in heights]
    grid = [tag("line", x1="0%", x2="100%", y1=f"{at:.1f}", y2=f"{at:.1f}", class_="axis") for at, _ in heights]
    below = [
        tag("text", text, x=_percent(x.position(value)), y=height + 16, text_anchor="middle")
        for value, text in x.ticks()
    ]
    x_title = tag("text", x.name, x="50%", y=height + 34, text_anchor="middle", class_="axis-title")
    box = {"height": height + 40, "class_": "plot"}
    return tag(
        "div",
        tag("h3", title) if title else None,
        tag("div", y.name, class_="axis-title y-title"),
        tag("svg", *labels, width=52, aria_hidden="true", **box),
        tag("svg", tag("title", title), *grid, content, *below, x_title, width="100%", role="img", **box),
        class_="graph",
    )


def _marks(x: Axis, y: Axis) -> Markup:
    marks = []
    if x.mark is not None and x.mark <= x.end:
        mark_x = _percent(x.position(x.mark))
        marks.append(tag("line", x1=mark_x, x2=mark_x, y1=0, y2=_HEIGHT, class_="reference"))
        marks.append(tag("text", x.mark_name, x=mark_x, y=_HEIGHT - 6, dx=4))
    if y.mark is not None and y.mark <= y.end:
        mark_y = f"{_HEIGHT * (1 - y.position(y.mark)):.1f}"
        marks.append(tag("line", x1="0%", x2="100%", y1=mark_y, y2=mark_y, class_="reference"))
        marks.append(tag("text", y.mark_name, x="0%", y=mark_y, dx=4, dy=-4))
    return join(*marks)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


STYLES = 6  # distinct colors and dashes before they repeat
_LINES_HEIGHT = 190
_MAX_POINTS = 400


@dataclass(frozen=True)
class Series:
    """Named points in order of x."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Labeled:
    """A point with its name; hollow: for reference."""

    name: str
    x: float
    y: float
    hollow: bool = False


@dataclass(frozen=True)
class Scale:
    """An axis range with its title, linear or logarithmic, and how its ticks are formatted."""

    name: str
    first: float
    last: float
    logarithmic: bool = False
    bytes: bool = False

    def position(self, value: float) -> float:
        if self.logarithmic:
            low, high, value = (math.log10(max(number, 1e-300)) for number in (self.first, self.last, value))
        else:
            low, high = self.first, self.last
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Return value and label of each tick."""
        if self.logarithmic:
            powers = range(math.ceil(math.log10(self.first)), math.floor(math.log10(self.last)) + 1)
            return [(10.0**power, self._power(power)) for power in powers]
        values = ticks_between(self.first, self.last)
        return [(value, numbers.size(value) if self.bytes and value else tick_text(value, values)) for value in values]

    def _power(self, power: int) -> str:
        return numbers.size(10.0**power) if self.bytes else f"{10.0**power:g}"


def make_scale(
    name: str, values: Sequence[float], *, zero: bool = False, log_ratio: float = math.inf, bytes: bool = False
) -> Scale:
    """Return the scale that holds all values; logarithmic if the largest exceeds `log_ratio` times the smallest."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if low > 0 and high / low > log_ratio:
        return Scale(name, 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)), True, bytes)
    low = 0.0 if zero and low >= 0 else low - 0.05 * (high - low)
    high = high + 0.05 * (high - low)
    return Scale(name, low, high if high > low else low + (abs(low) or 1.0), False, bytes)


def downsample(points: Sequence[Point]) -> tuple[list[Point], int]:
    """Average consecutive points if there are very many; return them and the group size."""
    stride = -(-len(points) // _MAX_POINTS) or 1
    groups = [points[start : start + stride] for start in range(0, len(points), stride)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups], stride


def lines(title: str, series: Sequence[Series], x: Scale, y: Scale, dots: Sequence[Sequence[Labeled]] = ()) -> Markup:
    """Draw a line through the points of each series; `dots` adds named points in its color, too."""
    polylines = [
        tag(
            "polyline",
            tag("title", each.name),
            points=_coordinates(each.points, x, y),
            class_=f"curve run{number % STYLES}",
        )
        for number, each in enumerate(series)
        if each.points
    ]
    box = tag(
        "svg",
        *polylines,
        viewBox=f"0 0 {_RESOLUTION} {_RESOLUTION}",
        preserveAspectRatio="none",
        width="100%",
        height=_LINES_HEIGHT,
    )
    circles = [
        tag(
            "circle",
            tag("title", dot.name),
            cx=_percent(x.position(dot.x)),
            cy=f"{_LINES_HEIGHT * (1 - y.position(dot.y)):.1f}",
            r=4,
            class_=f"spot run{number % STYLES}",
        )
        for number, each in enumerate(dots)
        for dot in each
    ]
    return _frame(title, x, y, join(box, *circles), _LINES_HEIGHT)


def scatter(points: Sequence[Labeled], x: Scale, y: Scale) -> Markup:
    """Draw a dot per point with its name beside it, on the side where there is room."""
    marks = []
    for point in points:
        left, top = x.position(point.x), _LINES_HEIGHT * (1 - y.position(point.y))
        beside = {"dx": 10, "text_anchor": "start"} if left < 0.6 else {"dx": -10, "text_anchor": "end"}
        marks += [
            tag(
                "circle",
                cx=_percent(left),
                cy=f"{top:.1f}",
                r=6,
                class_="estimate hollow" if point.hollow else "estimate",
            ),
            tag("text", point.name, x=_percent(left), y=f"{top + 4:.1f}", class_="point-name", **beside),
        ]
    return _frame("", x, y, join(*marks), _LINES_HEIGHT)


def legend(names: Sequence[str]) -> Markup:
    """Draw the legend."""
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
    """Draw one stacked bar of seconds on a scale that ends at `longest`; `axis_below` is its axis."""
    rects, start = [], 0.0
    for number, (name, value) in enumerate(parts):
        left, width = 100 * start / longest, 100 * value / longest
        title = tag("title", f"{name}: {1000 * value:.3g} ms")
        rects.append(
            tag("rect", title, x=f"{left:.2f}%", y=2, width=f"{width:.2f}%", height=18, class_=f"part{number}")
        )
        start += value
    return tag("svg", join(*rects), width="100%", height=22, role="img")


def _coordinates(points: Sequence[Point], x: Axis | Scale, y: Axis | Scale) -> str:
    return " ".join(f"{_RESOLUTION * x.position(px):.0f},{_RESOLUTION * (1 - y.position(py)):.0f}" for px, py in points)
