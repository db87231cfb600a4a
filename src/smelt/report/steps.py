"""The steps section: time, memory and effect of each step, with the facts a method reports in words for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from smelt.report import numbers, plots
from smelt.report.integer import SQNR
from smelt.report.markup import Markup, section, table, tag
from smelt.report.rows import Run

# The words for a fact. One that is true or false is said only if it is true; one that is not listed here is said with
# spaces for underscores.
_LABELS = {
    "bytes": "weight bytes",
    "kv_cache_bits_per_token": "KV cache bits per token",
    "repaired": "projections refitted",
    "gave_up": "refitting stopped early, as published, because a scale was out of bounds",
    "stream_rotated": "residual stream rotated",
    "head_untied": "head untied from the embedding",
    "widths_without_hadamard": "widths without a Hadamard rotation",
    "nodes": "integer operators",
    "vanished": "weights rounded to zero",
    "calibration_length": "mean tokens per calibration sample",
}
_FORMATS: dict[str, Callable[[float], str]] = {"bytes": numbers.size, "parameters_added": numbers.count}
_CURVE = "_curve"  # ends the name of a fact that is drawn
_IN_TABLE = {"block_parameters_before", SQNR}  # shown elsewhere on the page


def steps(run: Run) -> Markup | None:
    """List the time, memory and effect of every step."""
    listed = run.get("steps") or []
    if not listed:
        return None
    total = sum(step.get("seconds") or 0.0 for step in listed)
    foot = ("all steps", numbers.seconds(total), "", "", "", "") if len(listed) > 1 else ()
    headings = ("step", "time", "peak memory", "tensors changed", "parameters removed", "")
    return section("Steps", table(headings, (_step(step) for step in listed), foot))


def _step(step: Run) -> tuple[object, ...]:
    changed = step.get("changed") or {}
    texts = [_step_quality(step.get("quality") or {}), *fact_texts(step.get("facts") or {})]
    facts = [tag("div", text) for text in texts if text]
    removed = changed.get("parameters_removed")
    return (
        step.get("name", ""),
        _format_optional(step.get("seconds"), numbers.seconds),
        _format_optional(step.get("peak_bytes"), numbers.size),
        _format_optional(changed.get("tensors"), numbers.plain),
        _format_optional(removed, numbers.count) if removed else "none" if changed else "",
        tag("div", *facts, class_="facts") if facts else "",
    )


def training(run: Run) -> Markup | None:
    """Draw what the steps that train have recorded, such as `loss_curve`: pairs of training step and value."""
    graphs = []
    for step in run.get("steps") or []:
        for key, points in (step.get("facts") or {}).items():
            if key.endswith(_CURVE) and points:
                name = _label(key.removesuffix(_CURVE))
                x, y = plots.Axis("training step", points[-1][0]), plots.Axis(name, max(value for _, value in points))
                graphs.append(plots.curve(f"{name} of {step.get('name', '')}", points, x, y))
    return section("Training", tag("div", *graphs, class_="graphs")) if graphs else None


def fact_texts(facts: Run) -> list[str]:
    """Say each fact of a step; what was measured before and after is one fact, `weight bytes: 538 MB → 155 MB`."""
    texts = []
    for key, value in facts.items():
        name, _, when = str(key).rpartition("_")
        if key in _IN_TABLE or key.endswith(_CURVE) or value is False or value is None or value == []:
            continue
        if when in ("before", "after") and {f"{name}_before", f"{name}_after"} <= facts.keys():
            pair = [_value(name, facts[f"{name}_{side}"]) for side in ("before", "after")]
            texts += [f"{_label(name)}: {pair[0]} → {pair[1]}"] if when == "before" else []
        else:
            texts.append(_label(key) if value is True else f"{_label(key)}: {_value(key, value)}")
    return texts


def _label(key: str) -> str:
    return _LABELS.get(key, str(key).replace("_", " "))


def _value(key: str, value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_label(name)} {_value(name, item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_value(key, item) for item in value)
    if key in _FORMATS and isinstance(value, int | float):
        return _FORMATS[key](value)
    return numbers.plain(value)


def _step_quality(quality: Run) -> str:
    """Format the quality after a step and what the step cost, which is measured if the quality gate fails."""
    if not quality:
        return ""
    unit = "%" if quality.get("relative") else "pt"
    return f"{quality['metric']} {numbers.metric(quality['value'])} after it (drop {100 * quality['drop']:+.3g}{unit})"


def _format_optional(value: float | None, write: Callable[[float], str]) -> str:
    return "" if value is None else write(value)
