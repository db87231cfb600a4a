"""The speed section: measured medians with their spread, and a warning for whatever is not faster."""

from __future__ import annotations

from smelt.report.charts import Bar, bar
from smelt.report.markup import Markup, join, note, section, tag, warning
from smelt.report.rows import (
    Run,
    confidence_text,
    factor,
    interval_text,
    speed_label,
    speed_verdict,
    speedup_text,
    time_text,
)

_NOTE = "Medians of the timed calls; whiskers show the interquartile range. Lower is better."


def speed(run: Run) -> Markup | None:
    """Draw a pair of bars for every measurement."""
    entries = run.get("speed") or []
    if not entries:
        return None
    not_faster = [entry for entry in entries if speed_verdict(entry) != "faster"]
    warnings = [warning(f"{speed_label(entry)}: {speedup_text(entry)}.", lead="Not faster.") for entry in not_faster]
    how = _engine(run) or [note(_NOTE)]
    return section("Speed", *how, *warnings, *(_timing(entry) for entry in entries))


def _engine(run: Run) -> list[Markup]:
    """Name what computed the layers, and why the model is slower, if it is."""
    engine = run.get("engine")
    if not engine:
        return []
    after = engine["after"]
    layers = ", ".join(f"{number} {name}" for name, number in after["layers"].items())
    bandwidth = f"{after['copy_bandwidth'] / 1e9:,.0f} GB/s"
    shares = ", ".join(f"{row['share_of_roofline']:.0%} at {row['streams']}" for row in after["rows"])
    sentence = (
        f"Timed in the engine that serves the model ({after['backend']}); bars show the time per output token of a "
        f"stream, prompts included. Linear layers: {layers}. Share of the roofline, which is reading all weights once "
        f"per step at the {bandwidth} of a large copy, by streams: {shares}."
    )
    slowdown = [warning(f"{engine['slowdown']}", lead="Slower.")] if engine.get("slowdown") else []
    return [note(sentence), *slowdown]


def _bar(who: str, measured: Run) -> Bar:
    return Bar(measured["median_ms"], measured.get("spread_ms") or 0.0, who, f"{who}: {time_text(measured)}")


def _timing(entry: Run) -> Markup:
    pair = {who: entry[who] for who in ("before", "after")}
    bars = {who: _bar(who, measured) for who, measured in pair.items()}
    longest = max(bar.value + bar.spread / 2 for bar in bars.values()) or 1.0
    lines = [
        markup
        for who, measured in pair.items()
        for markup in (
            tag("span", who, class_="soft"),
            bar(bars[who], longest),
            tag("span", time_text(measured), class_="count"),
        )
    ]
    ends = interval_text(entry, factor, "ratio_")
    interval = note(f"speedup {ends} ({confidence_text(entry)})") if ends else None
    return join(
        tag("h3", f"{speed_label(entry)}: {speedup_text(entry)}"), tag("div", *lines, class_="timing"), interval
    )
