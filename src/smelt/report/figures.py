"""The top of the page: the row of big numbers, and the sentence that says what came out."""

from __future__ import annotations

from smelt.report import numbers
from smelt.report.markup import Markup, tag
from smelt.report.rows import (
    Run,
    confidence_words,
    interval_words,
    pace,
    pace_words,
    quality_change,
    quality_rows,
    relative_change,
    size_rows,
    speed_label,
    speed_up,
    times,
)


def figures(run: Run) -> Markup | None:
    """Quality, parameters, bytes, multiply-adds and speed, each with where it came from."""
    drawn = [*_quality(run), *_sizes(run), *_speed(run)]
    return tag("div", *drawn, class_="figures") if drawn else None


def verdict(run: Run) -> str:
    """The run's own sentence, or one put together from its figures."""
    if run.get("verdict"):
        return str(run["verdict"])
    sizes = size_rows(run)
    changed = [row for row in sizes if row.before != row.after] or sizes
    rows = [*changed[:1], *quality_rows(run)]
    clauses = [f"{row.label} {row.before} → {row.after}, {row.change}" for row in rows]
    clauses += [f"{pace_words(entry)} ({speed_label(entry)})" for entry in run.get("speed") or []]
    return "; ".join(clauses) + "." if clauses else ""


def figure(label: str, value: str, *notes: str) -> Markup:
    number, _, unit = value.partition(" ")
    written = tag("div", number, tag("span", f" {unit}", class_="unit") if unit else None, class_="value")
    below = [tag("div", note, class_="note") for note in notes if note]
    return tag("div", tag("div", label, class_="label"), written, *below, class_="figure")


def _quality(run: Run) -> list[Markup]:
    quality = run.get("quality") or {}
    if quality.get("before") is None or quality.get("after") is None:
        return []
    before, after = numbers.metric(quality["before"]), numbers.metric(quality["after"])
    comparison = quality.get("comparison") or {}
    ends = _percents(comparison) or interval_words(comparison, numbers.signed)
    notes = [f"from {before}", quality_change(quality), *([confidence_words(comparison), ends] if ends else [])]
    return [figure(str(quality.get("metric", "quality")), after, *notes)]


def _percents(comparison: Run) -> str:
    return interval_words(comparison, lambda ratio: numbers.percent(ratio - 1), "ratio_")


def _sizes(run: Run) -> list[Markup]:
    size = run.get("size") or {}
    kinds = (("parameters", numbers.count), ("bytes", numbers.size), ("macs", numbers.macs))
    labels = {"parameters": "parameters", "bytes": "bytes of weights", "macs": "multiply-adds"}
    pairs = [(labels[key], write, size[key]["before"], size[key]["after"]) for key, write in kinds if size.get(key)]
    return [
        figure(label, write(after), f"from {write(before)}", relative_change(before, after))
        for label, write, before, after in pairs
    ]


def _speed(run: Run) -> list[Markup]:
    if not run.get("speed"):
        return []
    entry = run["speed"][0]
    ends = interval_words(entry, times, "ratio_")
    said = pace_words(entry) if pace(entry) == "no faster" else pace(entry)
    notes = [said, *([confidence_words(entry), ends] if ends else []), speed_label(entry)]
    return [figure("measured speed", times(speed_up(entry)), *notes)]
