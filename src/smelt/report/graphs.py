"""Graphs over two axes as inline SVG: curves, steps and spots, with round numbers beside them.

The drawing stretches with the page; text and lines keep their size. Positions along the page are percentages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smelt.report.charts import tick_text, ticks_between
from smelt.report.markup import Markup, join, tag

_HEIGHT = 170  # of the drawing; the numbers and the name of the lower axis come below it
_MOST_SPOTS = 1500
_FINE = 10_000  # steps of the box in which curves are drawn

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """From zero to `top`; `mark` is a value that is drawn as a line across, with its name."""

    name: str
    top: float
    mark: float | None = None
    mark_name: str = ""

    @property
    def end(self) -> float:
        return self.top if self.top > 0 else 1.0

    def place(self, value: float) -> float:
        return min(max(value / self.end, 0.0), 1.0)


def curve(title: str, points: Sequence[Point], x: Axis, y: Axis) -> Markup:
    """A line through the points."""
    return _graph(title, x, y, _line(points, x, y))


def steps(title: str, points: Sequence[Point], x: Axis, y: Axis) -> Markup:
    """Each value holds until the next point."""
    corners: list[Point] = []
    for here, value in points:
        corners += [(here, corners[-1][1]), (here, value)] if corners else [(here, value)]
    return _graph(title, x, y, _line(corners, x, y))


def spots(title: str, points: Sequence[Point], x: Axis, y: Axis) -> Markup:
    """A dot for each point; of very many only every so manieth."""
    every = -(-len(points) // _MOST_SPOTS) or 1
    drawn = [
        tag("circle", cx=_percent(x.place(one)), cy=f"{_HEIGHT * (1 - y.place(two)):.1f}", r=2.5, class_="spot")
        for one, two in points[::every]
    ]
    return _graph(title, x, y, join(*drawn))


def _line(points: Sequence[Point], x: Axis, y: Axis) -> Markup:
    places = (f"{_FINE * x.place(one):.0f},{_FINE * (1 - y.place(two)):.0f}" for one, two in points)
    return tag(
        "svg",
        tag("polyline", points=" ".join(places), class_="curve"),
        viewBox=f"0 0 {_FINE} {_FINE}",
        preserveAspectRatio="none",
        width="100%",
        height=_HEIGHT,
    )


def _graph(title: str, x: Axis, y: Axis, drawn: Markup) -> Markup:
    """The numbers of the upright axis stand in a box of their own, whose width does not change with the page."""
    upright, across = ticks_between(0, y.end), ticks_between(0, x.end)
    numbers = [
        tag("text", tick_text(tick, upright), x="44", y=f"{_HEIGHT * (1 - y.place(tick)) + 4:.1f}", text_anchor="end")
        for tick in upright
    ]
    lines = [
        tag("line", x1="0%", x2="100%", y1=f"{height:.1f}", y2=f"{height:.1f}", class_="axis")
        for height in (_HEIGHT * (1 - y.place(tick)) for tick in upright)
    ]
    below = [
        tag("text", tick_text(tick, across), x=_percent(x.place(tick)), y=_HEIGHT + 16, text_anchor="middle")
        for tick in across
    ]
    name = tag("text", x.name, x="100%", y=_HEIGHT + 32, text_anchor="end")
    box = {"height": _HEIGHT + 38, "role": "img", "class_": "plot"}
    return tag(
        "div",
        tag("h3", f"{title}, {y.name}" if y.name else title),
        tag("svg", *numbers, width=52, height=_HEIGHT + 38, aria_hidden="true", class_="plot"),
        tag("svg", tag("title", title), *lines, _marks(x, y), drawn, *below, name, width="100%", **box),
        class_="graph",
    )


def _marks(x: Axis, y: Axis) -> Markup:
    drawn = []
    if x.mark is not None and x.mark <= x.end:
        at = _percent(x.place(x.mark))
        drawn.append(tag("line", x1=at, x2=at, y1=0, y2=_HEIGHT, class_="reference"))
        drawn.append(tag("text", x.mark_name, x=at, y=_HEIGHT - 6, dx=4))
    if y.mark is not None and y.mark <= y.end:
        at = f"{_HEIGHT * (1 - y.place(y.mark)):.1f}"
        drawn.append(tag("line", x1="0%", x2="100%", y1=at, y2=at, class_="reference"))
        drawn.append(tag("text", y.mark_name, x="0%", y=at, dx=4, dy=-4))
    return join(*drawn)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"
