"""The speed section: measured medians with their spread, and a warning for whatever is not faster."""

from __future__ import annotations

from collections import Counter

from smelt.report.charts import Bar, axis_below, bar
from smelt.report.layers import name_in_block
from smelt.report.markup import Markup, details, join, note, section, table, tag, warning
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
    """Draw a pair of bars for every measurement, and say what the speed guard decided."""
    entries = run.get("speed") or []
    guard = [*map(note, guard_sentences(run)), *_slower_layers(run)]
    if not entries and not guard:
        return None
    explained = bool((run.get("engine") or {}).get("slowdown"))  # by the sentence of the engine
    not_faster = [entry for entry in entries if speed_verdict(entry) != "faster" and not explained]
    warnings = [warning(f"{speed_label(entry)}: {speedup_text(entry)}.", lead="Not faster.") for entry in not_faster]
    how = _engine(run) or ([note(_NOTE)] if entries else [])
    return section("Speed", *how, *guard, *warnings, *(_timing(entry) for entry in entries), *_backends(run))


def _engine(run: Run) -> list[Markup]:
    """Say how the models were timed, and why the model is slower, if it is."""
    sentence = engine_sentence(run)
    if not sentence:
        return []
    slowdown = run["engine"].get("slowdown")
    bars = "Bars show the time per output token of a stream, prompts included."
    return [note(f"{sentence} {bars}"), *([warning(_sentence(str(slowdown)))] if slowdown else [])]


def engine_sentence(run: Run) -> str:
    """Say what computed the layers and the share of the roofline; empty if the model was not timed in an engine."""
    if not run.get("engine"):
        return ""
    after = run["engine"]["after"]
    layers = ", ".join(f"{number} {name}" for name, number in after["layers"].items())
    shares = ", ".join(f"{row['share_of_roofline']:.0%} at {row['streams']}" for row in after["rows"])
    bandwidth = f"{after['copy_bandwidth'] / 1e9:,.0f} GB/s"
    return (
        f"Timed in the engine that serves the model ({after['backend']}). "
        f"{f'Linear layers: {layers}. ' if layers else ''}"
        f"Share of the roofline, which is reading all weights once per step at the {bandwidth} of a large copy, "
        f"by streams: {shares}."
    )


def guard_sentences(run: Run) -> list[str]:
    """Return what the speed guard decided in each step that quantizes."""
    guards = [step["speed_guard"] for step in run.get("steps") or [] if step.get("speed_guard")]
    return [_sentence(guard["sentence"]) for guard in guards]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _slower_layers(run: Run) -> list[Markup]:
    """List what the layers became that the guard found slower, with their times relative to unquantized ones."""
    rows: Counter[tuple[str, str, str]] = Counter()
    for step in run.get("steps") or []:
        for path, layer in ((step.get("speed_guard") or {}).get("layers") or {}).items():
            times = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in layer["time_ratios"].items())
            rows[name_in_block(path), layer["became"], times] += 1
    headings = ("slower layer", "became", "time relative to the unquantized layer", "layers")
    return [table(headings, [(*row, str(number)) for row, number in rows.items()])] if rows else []


def _backends(run: Run) -> list[Markup]:
    """List what computes each layer, before and after; layers of the same name in all blocks share a row."""
    engine = run.get("engine") or {}
    counts: dict[str, dict[str, Counter[str]]] = {}
    for who in ("before", "after"):
        for path, backend in (engine.get(who) or {}).get("layer_backends", {}).items():
            counts.setdefault(name_in_block(path), {}).setdefault(who, Counter())[backend] += 1
    if not counts:
        return []
    rows = [(name, *(_counted(by_model.get(who)) for who in ("before", "after"))) for name, by_model in counts.items()]
    return [details("Show the kernel of each layer", table(("linear layer", "before", "after"), rows))]


def _counted(backends: Counter[str] | None) -> str:
    return ", ".join(f"{backend} ({number})" for backend, number in (backends or Counter()).most_common())


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
    unit = "milliseconds per output token" if "first_token_ms" in entry["after"] else "milliseconds"
    lines += [tag("span"), axis_below(longest, unit), tag("span")]
    ends = interval_text(entry, factor, "ratio_")
    interval = note(f"speedup {ends} ({confidence_text(entry)})") if ends else None
    return join(
        tag("h3", f"{speed_label(entry)}: {speedup_text(entry)}"), tag("div", *lines, class_="timing"), interval
    )
