"""The rows of the before-and-after table, shared by the page and the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from smelt.report import numbers

Run = Mapping[str, Any]
SpeedVerdict = Literal["faster", "slower", "no change"]
BLOCK_PARAMETERS = "parameters in blocks"


@dataclass(frozen=True)
class ComparisonRow:
    """One quantity before and after, as text."""

    label: str
    before: str
    after: str
    change: str
    values: tuple[float, float] | None = None  # before and after, for bars

    @property
    def changed(self) -> bool:
        return self.before != self.after


def before_after(run: Run) -> list[ComparisonRow]:
    """Build the rows for quality, size, memory and speed that the run has, without sizes that stayed the same."""
    sizes = [row for row in (*size_rows(run), *_memory_rows(run)) if row.changed]
    return [*quality_rows(run), *sizes, *_speed_rows(run)]


def interval_text(source: Run, write: Callable[[float], str], prefix: str = "") -> str:
    """Format the interval in `low` and `high` (or `ratio_low` and `ratio_high`); empty without one."""
    low, high = source.get(f"{prefix}low"), source.get(f"{prefix}high")
    return "" if low is None or high is None else f"{write(low)} to {write(high)}"


def confidence_text(source: Run) -> str:
    return f"{100 * source.get('confidence', 0.95):g} % interval"


def factor(ratio: float) -> str:
    return f"{ratio:.2f}×"


def relative_change(before: float, after: float) -> str:
    """Format the relative change in percent; empty if it is undefined or not finite."""
    change = (after - before) / abs(before) if before else math.nan
    return numbers.percent(change) if math.isfinite(change) else ""


def speedup(entry: Run) -> float:
    """Return the speedup: time before divided by time after."""
    ratio = entry.get("ratio")
    return float(entry["before"]["median_ms"] / entry["after"]["median_ms"] if ratio is None else ratio)


def speed_verdict(entry: Run) -> SpeedVerdict:
    """Classify a speed entry; an interval of the ratio that contains 1 is no measurable change."""
    low, high = (entry.get(key) for key in ("ratio_low", "ratio_high"))
    if (speedup(entry) if low is None else low) > 1:
        return "faster"
    return "slower" if (speedup(entry) if high is None else high) < 1 else "no change"


def speedup_text(entry: Run) -> str:
    """Format a speed entry: 1.21× faster, 1.08× slower, no measurable change."""
    texts = {
        "faster": f"{factor(speedup(entry))} faster",
        "slower": f"{factor(1 / speedup(entry))} slower",
        "no change": "no measurable change",
    }
    return texts[speed_verdict(entry)]


def quality_change(quality: Run) -> str:
    """Format the change of the metric, relative for unbounded ones (perplexity), and whether it is better or worse."""
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


def quality_rows(run: Run) -> list[ComparisonRow]:
    quality = run.get("quality") or {}
    if quality.get("before") is None or quality.get("after") is None:
        return []
    label = str(quality.get("metric", "quality"))
    if quality.get("data"):
        label += f" on {short_path(str(quality['data']))}"
    return [
        ComparisonRow(
            label,
            numbers.metric(quality["before"]),
            numbers.metric(quality["after"]),
            quality_change(quality),
            (quality["before"], quality["after"]),
        )
    ]


def short_path(name: str) -> str:
    """Shorten an absolute path to its last folder and name; names of models and data that are no paths stay."""
    return "/".join(name.split("/")[-2:]) if name.startswith("/") else name


def size_rows(run: Run) -> list[ComparisonRow]:
    size = run.get("size") or {}
    macs_label = "MACs"
    if (size.get("macs") or {}).get("tokens"):
        macs_label += f", {size['macs']['tokens']} tokens"
    if (size.get("macs") or {}).get("image_size"):
        macs_label += f", {size['macs']['image_size']} pixels squared"
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("parameters", "parameters", numbers.count),
        ("block_parameters", BLOCK_PARAMETERS, numbers.count),
        ("bytes", "weight bytes", numbers.size),
        ("macs", macs_label, numbers.macs),
    ]
    rows = [_row(label, size[key], write) for key, label, write in columns if size.get(key)]
    return [*rows, *_token_rows(run), *_kv_cache_rows(run)]


def _token_rows(run: Run) -> list[ComparisonRow]:
    """Build the row of the MACs of a text of the training data, if a step drops tokens."""
    facts = [step.get("facts") or {} for step in run.get("steps") or []]
    pairs = [
        {when: each[f"text_macs_{when}"] for when in ("before", "after")} for each in facts if "text_macs_after" in each
    ]
    return [_row("MACs per text, tokens dropped", pairs[-1], numbers.macs)] if pairs else []


def _kv_cache_rows(run: Run) -> list[ComparisonRow]:
    """Build the row of the KV cache, if a step has changed its format."""
    bits = {"before": "kv_cache_bits_per_token_before", "after": "kv_cache_bits_per_token_after"}
    facts = [step.get("facts") or {} for step in run.get("steps") or []]
    changed = [{when: each[key] / 8 for when, key in bits.items()} for each in facts if bits["after"] in each]
    pair = {"before": changed[0]["before"], "after": changed[-1]["after"]} if changed else {}
    return [_row("KV cache per token", pair, numbers.size)] if pair else []


def _memory_rows(run: Run) -> list[ComparisonRow]:
    return [_row("peak memory", run["memory"], numbers.size)] if run.get("memory") else []


def _row(label: str, pair: Run, write: Callable[[float], str]) -> ComparisonRow:
    before, after = pair["before"], pair["after"]
    return ComparisonRow(label, write(before), write(after), relative_change(before, after), (before, after))


def _speed_rows(run: Run) -> list[ComparisonRow]:
    return [
        ComparisonRow(
            speed_label(entry),
            time_text(entry["before"]),
            time_text(entry["after"]),
            speedup_text(entry),
            (_speed_value(entry["before"]), _speed_value(entry["after"])),
        )
        for entry in run.get("speed") or []
    ]


def _speed_value(measured: Run) -> float:
    """Return what the text of a measurement says: tokens per second if it was served, else milliseconds."""
    return float(measured["tokens_per_second"] if "first_token_ms" in measured else measured["median_ms"])


def opens_in_sentence(run: Run) -> str:
    """Say which programs open the result; empty if the run does not know."""
    programs = run.get("opens_in") or []
    return f"opens in: {', '.join(map(str, programs))}" if programs else ""


def speed_label(entry: Run) -> str:
    """Name what was timed, and the device."""
    return ", ".join(str(entry[key]) for key in ("name", "device") if entry.get(key)) or "latency"


def time_text(measured: Run) -> str:
    """Format a median ± half the interquartile range; of a served model, what its users see."""
    if "first_token_ms" in measured:
        first = numbers.seconds(measured["first_token_ms"] / 1000)
        return f"{numbers.per_second(measured['tokens_per_second'])} tokens/s, first token {first}"
    return numbers.milliseconds(measured["median_ms"], (measured.get("spread_ms") or 0.0) / 2)
