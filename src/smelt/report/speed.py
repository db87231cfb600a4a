"""The speed section: measured medians with their spread. What did not get faster is said plainly."""

from __future__ import annotations

from smelt.report.charts import Bar, bar
from smelt.report.elements import note, section, warning
from smelt.report.markup import Markup, join, tag
from smelt.report.rows import Run, confidence_words, interval_words, pace, pace_words, speed_label, time_words, times

_EXPLAINED = "Medians of the timed calls; the whisker is the interquartile range. Less is better."


def speed(run: Run) -> Markup | None:
    """A pair of bars for everything that was timed."""
    entries = run.get("speed") or []
    if not entries:
        return None
    missed = [entry for entry in entries if pace(entry) != "faster"]
    warnings = [warning(f"{speed_label(entry)}: {pace_words(entry)}.", lead="Not faster.") for entry in missed]
    return section("Speed", note(_EXPLAINED), *warnings, *(_timing(entry) for entry in entries))


def _bar(who: str, measured: Run) -> Bar:
    return Bar(measured["median_ms"], measured.get("spread_ms") or 0.0, who, f"{who}: {time_words(measured)}")


def _timing(entry: Run) -> Markup:
    pair = {who: entry[who] for who in ("before", "after")}
    bars = {who: _bar(who, measured) for who, measured in pair.items()}
    longest = max(one.value + one.spread / 2 for one in bars.values()) or 1.0
    lines = [
        piece
        for who, measured in pair.items()
        for piece in (
            tag("span", who, class_="soft"),
            bar(bars[who], longest),
            tag("span", time_words(measured), class_="count"),
        )
    ]
    ends = interval_words(entry, times, "ratio_")
    interval = note(f"speed-up {ends} ({confidence_words(entry)})") if ends else None
    return join(tag("h3", f"{speed_label(entry)}: {pace_words(entry)}"), tag("div", *lines, class_="timing"), interval)
