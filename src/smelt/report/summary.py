"""The top of the page: the row of headline figures and the verdict."""

from __future__ import annotations

from smelt.report import numbers
from smelt.report.markup import Markup, tag
from smelt.report.rows import (
    BLOCK_PARAMETERS,
    ComparisonRow,
    Run,
    confidence_text,
    factor,
    interval_text,
    quality_change,
    quality_rows,
    size_rows,
    speed_label,
    speed_verdict,
    speedup,
    speedup_text,
)


def figures(run: Run) -> Markup | None:
    """Draw quality, parameters, bytes, MACs and speed, each with the value before."""
    items = [*_quality(run), *_sizes(run), *_speed(run)]
    return tag("div", *items, class_="figures") if items else None


def verdict(run: Run) -> str:
    """Return the run's own sentence, or one built from its figures."""
    if run.get("verdict"):
        return str(run["verdict"])
    sizes = [row for row in size_rows(run) if row.changed]
    rows = [*sizes[:1], *quality_rows(run)]
    clauses = [_clause(row) for row in rows]
    clauses += [f"{speedup_text(entry)} ({speed_label(entry)})" for entry in run.get("speed") or []]
    text = "; ".join(clauses)
    return f"{text[:1].upper()}{text[1:]}." if clauses else ""


def _clause(row: ComparisonRow) -> str:
    change = row.change.replace(" (", ", ").rstrip(")")  # parentheses are not nested
    return f"{row.label} {row.before} → {row.after}" + (f" ({change})" if change else "")


def figure(label: str, value: str, *notes: str) -> Markup:
    number, _, unit = value.partition(" ")
    formatted = tag("div", number, tag("span", f" {unit}", class_="unit") if unit else None, class_="value")
    below = [tag("div", note, class_="note") for note in notes if note]
    return tag("div", tag("div", label, class_="label"), formatted, *below, class_="figure")


def _quality(run: Run) -> list[Markup]:
    quality = run.get("quality") or {}
    if quality.get("before") is None or quality.get("after") is None:
        return []
    before, after = numbers.metric(quality["before"]), numbers.metric(quality["after"])
    comparison = quality.get("comparison") or {}
    ends = _percents(comparison) or interval_text(comparison, numbers.signed)
    notes = [f"from {before}", quality_change(quality), *([confidence_text(comparison), ends] if ends else [])]
    return [figure(str(quality.get("metric", "quality")), after, *notes)]


def _percents(comparison: Run) -> str:
    return interval_text(comparison, lambda ratio: numbers.percent(ratio - 1), "ratio_")


def _sizes(run: Run) -> list[Markup]:
    rows = [row for row in size_rows(run) if row.changed and row.label != BLOCK_PARAMETERS]
    return [figure(row.label, row.after, f"from {row.before}", row.change) for row in rows]


def _speed(run: Run) -> list[Markup]:
    if not run.get("speed"):
        return []
    entry = run["speed"][0]
    ends = interval_text(entry, factor, "ratio_")
    verdict_text = speedup_text(entry) if speed_verdict(entry) == "no change" else speed_verdict(entry)
    notes = [verdict_text, *([confidence_text(entry), ends] if ends else []), speed_label(entry)]
    return [figure("measured speed", factor(speedup(entry)), *notes)]
