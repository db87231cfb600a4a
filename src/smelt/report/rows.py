"""The rows of the before-and-after table: one list for the page and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from smelt.report import numbers

Run = Mapping[str, Any]
Pace = Literal["faster", "slower", "no faster"]


@dataclass(frozen=True)
class Row:
    """One quantity before and after, as text."""

    label: str
    before: str
    after: str
    change: str


def before_after(run: Run) -> list[Row]:
    """Quality, size, memory and speed, as far as the run has them."""
    return [*quality_rows(run), *size_rows(run), *_memory_rows(run), *_speed_rows(run)]


def interval_words(source: Run, write: Callable[[float], str], prefix: str = "") -> str:
    """The ends of an interval that lie in `low` and `high` (or `ratio_low` and `ratio_high`); empty without them."""
    low, high = source.get(f"{prefix}low"), source.get(f"{prefix}high")
    return "" if low is None or high is None else f"{write(low)} to {write(high)}"


def confidence_words(source: Run) -> str:
    return f"{100 * source.get('confidence', 0.95):g} % interval"


def times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def relative_change(before: float, after: float) -> str:
    """The change in per cent; empty where there is none to speak of (from nothing, or of what is not finite)."""
    ratio = after / before if before else math.nan
    return numbers.percent(ratio - 1) if math.isfinite(ratio) else ""


def speed_up(entry: Run) -> float:
    """How many times as fast the model is afterwards."""
    ratio = entry.get("ratio")
    return float(entry["before"]["median_ms"] / entry["after"]["median_ms"] if ratio is None else ratio)


def pace(entry: Run) -> Pace:
    """What a speed entry shows; where the interval of the ratio holds 1, nothing was gained that one could measure."""
    low, high = (entry.get(key) for key in ("ratio_low", "ratio_high"))
    if (speed_up(entry) if low is None else low) > 1:
        return "faster"
    return "slower" if (speed_up(entry) if high is None else high) < 1 else "no faster"


def pace_words(entry: Run) -> str:
    """The pace as a phrase: 1.21× faster, 1.08× slower, no measurable change."""
    words = {
        "faster": f"{times(speed_up(entry))} faster",
        "slower": f"{times(1 / speed_up(entry))} slower",
        "no faster": "no measurable change",
    }
    return words[pace(entry)]


def quality_change(quality: Run) -> str:
    """The metric's change, relative where the metric has no upper end (perplexity), and what it is worth."""
    before, after = quality["before"], quality["after"]
    if before == after:
        return "unchanged"
    change = relative_change(before, after) if max(abs(before), abs(after)) > 1 else numbers.signed(after - before)
    return f"{change} ({_direction(quality)})".strip()


def _direction(quality: Run) -> str:
    comparison = quality.get("comparison") or {}
    low, high = comparison.get("low"), comparison.get("high")
    if low is not None and high is not None and low <= 0 <= high:
        return "within noise"
    better = (quality["after"] > quality["before"]) == bool(quality.get("higher_is_better", True))
    return "better" if better else "worse"


def quality_rows(run: Run) -> list[Row]:
    quality = run.get("quality") or {}
    if quality.get("before") is None or quality.get("after") is None:
        return []
    label = str(quality.get("metric", "quality"))
    if quality.get("data"):
        label += f" on {quality['data']}"
    return [Row(label, numbers.metric(quality["before"]), numbers.metric(quality["after"]), quality_change(quality))]


def size_rows(run: Run) -> list[Row]:
    size = run.get("size") or {}
    macs_label = "multiply-adds"
    if (size.get("macs") or {}).get("tokens"):
        macs_label += f", {size['macs']['tokens']} tokens"
    kinds: list[tuple[str, str, Callable[[float], str]]] = [
        ("parameters", "parameters", numbers.count),
        ("block_parameters", "parameters in blocks", numbers.count),
        ("bytes", "bytes of weights", numbers.size),
        ("macs", macs_label, numbers.macs),
    ]
    return [_row(label, size[key], write) for key, label, write in kinds if size.get(key)]


def _memory_rows(run: Run) -> list[Row]:
    return [_row("peak memory", run["memory"], numbers.size)] if run.get("memory") else []


def _row(label: str, pair: Run, write: Callable[[float], str]) -> Row:
    before, after = pair["before"], pair["after"]
    return Row(label, write(before), write(after), relative_change(before, after))


def _speed_rows(run: Run) -> list[Row]:
    return [
        Row(speed_label(entry), time_words(entry["before"]), time_words(entry["after"]), pace_words(entry))
        for entry in run.get("speed") or []
    ]


def speed_label(entry: Run) -> str:
    """What was timed, and on which device."""
    return ", ".join(str(entry[key]) for key in ("name", "device") if entry.get(key)) or "latency"


def time_words(measured: Run) -> str:
    """A median with half its interquartile range to both sides."""
    return numbers.milliseconds(measured["median_ms"], (measured.get("spread_ms") or 0.0) / 2)
