"""Bars, cells and interval plots as inline SVG; positions are percentages, so charts stretch while text does not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smelt.report.markup import Markup, join, tag


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


@dataclass(frozen=True)
class Bar:
    """A bar from zero, with a whisker of ± half the spread at its end."""

    value: float
    spread: float
    style: str
    title: str


def bar(entry: Bar, longest: float) -> Markup:
    """Draw one bar on a scale that ends at `longest`."""
    end = entry.value / longest
    low, high = (max(0.0, entry.value + side * entry.spread / 2) / longest for side in (-1, 1))
    whisker = join(
        tag("line", x1=_percent(low), x2=_percent(high), y1=11, y2=11, class_="whisker"),
        *(tag("line", x1=_percent(edge), x2=_percent(edge), y1=7, y2=15, class_="whisker") for edge in (low, high)),
    )
    return tag(
        "svg",
        tag("title", entry.title),
        tag("rect", x=0, y=2, width=_percent(end), height=18, rx=3, class_=entry.style),
        whisker if entry.spread else None,
        width="100%",
        height=22,
        role="img",
    )


def pair_of_bars(before: float, after: float, title: str) -> Markup:
    """Draw a thin bar before above one after; the longer one fills the width."""
    longest = max(before, after)
    if not 0 < longest < math.inf or min(before, after) < 0:
        return join()
    rects = [
        tag("rect", x=0, y=top, width=_percent(value / longest), height=8, rx=2, class_=style)
        for value, top, style in ((before, 2, "before"), (after, 12, "after"))
    ]
    return tag("svg", tag("title", title), *rects, width="100%", height=22, role="img")


def fraction_bar(kept: float, title: str) -> Markup:
    """Draw a track filled to the fraction that was kept."""
    return tag(
        "svg",
        tag("title", title),
        tag("rect", x=0, y=1, width="100%", height=12, rx=2, class_="removed"),
        tag("rect", x=0, y=1, width=_percent(kept), height=12, rx=2, class_="kept"),
        width="100%",
        height=14,
        role="img",
    )


def cells(kept: set[int], of: int, unit: str) -> Markup:
    """Draw one cell per unit in the original order: filled if kept, hollow if removed."""
    rects = [
        tag(
            "rect",
            tag("title", f"{unit} {index}: {'kept' if index in kept else 'removed'}"),
            x=_percent((index + 0.06) / of),
            y=1,
            width=_percent(0.88 / of),
            height=12,
            rx=2,
            class_="cell kept" if index in kept else "cell removed",
        )
        for index in range(of)
    ]
    return tag("svg", *rects, width="100%", height=14, role="img", style=f"max-width:{20 * of}px")


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval; `reference` is the value that means no change."""

    value: float
    low: float
    high: float
    reference: float
    higher_is_better: bool

    @property
    def finite(self) -> bool:
        return all(math.isfinite(number) for number in (self.value, self.low, self.high))


def axis_below(last: float, title: str) -> Markup:
    """Draw the axis of the bars above it, from zero to `last`, with its title."""
    ticks = ticks_between(0, last)
    labels = [
        join(
            tag("line", x1=_percent(tick / last), x2=_percent(tick / last), y1=1, y2=5, class_="axis"),
            tag("text", tick_text(tick, ticks), x=_percent(tick / last), y=19, text_anchor="middle"),
        )
        for tick in ticks
    ]
    line = tag("line", x1="0%", x2="100%", y1=1, y2=1, class_="axis")
    name = tag("text", title, x="50%", y=36, text_anchor="middle", class_="axis-title")
    return tag("svg", line, *labels, name, width="100%", height=44, role="img", class_="bar-axis")


def interval_plot(interval: Interval, title: str, axis_title: str) -> Markup:
    """Draw the estimate as a dot on its interval, with the line of no change and the better side labeled."""
    first, last = _padded(interval)
    ticks = ticks_between(first, last)

    def position(value: float) -> str:
        return _percent((value - first) / (last - first))

    left, right = ("← worse", "better →") if interval.higher_is_better else ("← better", "worse →")
    axis = [
        join(
            tag("line", x1=position(tick), x2=position(tick), y1=62, y2=67, class_="axis"),
            tag("text", tick_text(tick, ticks), x=position(tick), y=82, text_anchor="middle"),
        )
        for tick in ticks
    ]
    return tag(
        "svg",
        tag("title", title),
        tag("text", left, x="0%", y=12),
        tag("text", right, x="100%", y=12, text_anchor="end"),
        tag("line", x1="0%", x2="100%", y1=62, y2=62, class_="axis"),
        *axis,
        tag("line", x1=position(interval.reference), x2=position(interval.reference), y1=20, y2=62, class_="reference"),
        tag("line", x1=position(interval.low), x2=position(interval.high), y1=42, y2=42, class_="interval"),
        *(
            tag("line", x1=position(end), x2=position(end), y1=35, y2=49, class_="interval")
            for end in (interval.low, interval.high)
        ),
        tag("circle", cx=position(interval.value), cy=42, r=6, class_="estimate"),
        tag("text", axis_title, x="50%", y=100, text_anchor="middle", class_="axis-title"),
        width="100%",
        height=106,
        role="img",
        class_="plot",
    )


def _padded(interval: Interval) -> tuple[float, float]:
    """Return the axis range: everything drawn plus padding."""
    values = (interval.value, interval.low, interval.high, interval.reference)
    width = max(values) - min(values) or abs(interval.reference) or 1.0
    return min(values) - 0.12 * width, max(values) + 0.12 * width


def ticks_between(first: float, last: float) -> list[float]:
    """Return three to six round numbers inside the range."""
    rough = (last - first) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [index * step for index in range(math.ceil(first / step), math.floor(last / step) + 1)]


def tick_text(tick: float, ticks: list[float]) -> str:
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{tick:.{decimals}f}".replace("-", "−") if tick else "0"
