"""The page of training runs: loss against time and bytes, what was sent, and where the time went; one run or several.

A run is a plain dict with a `name`, the `facts` of its `run.json` and the `lines` of its `run.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from smelt.report import numbers, sections
from smelt.report.elements import note, section, table, warning
from smelt.report.figures import figure
from smelt.report.graphs import Point
from smelt.report.markup import Markup, join, tag
from smelt.report.page import page
from smelt.report.rows import Run
from smelt.report.series import Scale, Series, key_of, lines, scale_of, stacked, thinned

PHASES = ("data", "forward", "backward", "reduce", "optimizer")
_WIDE = 30.0  # an axis whose ends lie further apart than so many times is logarithmic
_PLAIN, _DENSE = "none", "dense"  # without a compressor, and as `auto` calls it


def render_training(runs: Sequence[Run]) -> str:
    """The page; every run must have at least one line."""
    title = f"Training: {', '.join(str(run['name']) for run in runs)}"
    return page(
        title,
        tag("header", tag("h1", title), tag("div", _what(runs[0]), class_="soft")),
        *(warning(text) for run in runs for text in _warnings(run)),
        _figures(runs[0]) if len(runs) == 1 else None,
        section("Loss", _key(runs), tag("div", *_losses(runs), class_="graphs"), _thin_note(runs)),
        section("What was sent", _key(runs), tag("div", *_sent(runs), class_="graphs"), note(_SENT)),
        section("Time of a step by phase", _phases(runs), note(_phase_note(runs))),
        section("Facts", table(["", *(str(run["name"]) for run in runs)], fact_rows(runs))),
        *(_decision(run) for run in runs),
        *(section(f"Configuration of {run['name']}", _settings(run)) for run in runs),
        sections.machine(runs[0]["facts"]),
        tag("footer", "Written by Smelt."),
    )


_SENT = (
    "Bytes are those that arrive at a worker, mean over workers, when collectives run as rings. Build-up is what was "
    "sent over what the density asks for; padding is what the gather of indices carries beyond what was chosen."
)


def summary(run: Run) -> dict[str, Any]:
    """A run in a few numbers."""
    steps = run["lines"]
    last = steps[-1]
    held_out = [line["evaluation"] for line in steps if line.get("evaluation")]
    padding = [line["padding"] for line in steps if line.get("padding") is not None]
    return {
        "steps": last["step"],
        "seconds": last["seconds"],
        "loss": last["loss"],
        "held_out": held_out[-1] if held_out else None,
        "best_held_out_loss": min((each["loss"] for each in held_out), default=None),
        "bytes": last["all_bytes"],
        "bytes_per_step": _mean([line["bytes"] for line in steps]),
        "inside_per_step": _mean([line["inside"] for line in steps]),
        "density": _mean([line["density"] for line in steps]),
        "build_up": _mean([line["build_up"] for line in steps]),
        "padding": _mean(padding) if padding else None,
        "skipped": sum(bool(line["skipped"]) for line in steps),
        "phases": phase_means(steps),
    }


def phase_means(steps: Sequence[Run]) -> dict[str, float]:
    """Seconds of each phase in a step; the first step only warms up, where there are others."""
    counted = steps[1:] or steps
    return {phase: _mean([line["phases"][phase] for line in counted]) for phase in PHASES}


def fact_rows(runs: Sequence[Run]) -> list[list[str]]:
    """A row a fact, a column a run: for the page and for the terminal."""
    found = [summary(run) for run in runs]
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("steps", lambda one: numbers.count(one["steps"])),
        ("seconds", lambda one: numbers.seconds(one["seconds"])),
        ("last loss", lambda one: numbers.metric(one["loss"])),
        ("held out, at the end", lambda one: _held_out_words(one["held_out"])),
        ("bytes that arrived at a worker", lambda one: numbers.size(one["bytes"])),
        ("bytes a step", lambda one: numbers.size(one["bytes_per_step"])),
        ("density, mean", lambda one: f"{one['density']:.3g}"),
        ("build-up, mean", lambda one: f"{one['build_up']:.3g}"),
        ("padding, mean", lambda one: "-" if one["padding"] is None else f"{one['padding']:.3g}"),
        ("skipped steps", lambda one: numbers.count(one["skipped"])),
    ]
    first = [
        ["gradients", *(_method(run) for run in runs)],
        ["workers", *(f"{run['facts']['workers']}, {run['facts']['backend']}" for run in runs)],
        ["parameters", *(numbers.count(run["facts"]["parameters"]) for run in runs)],
    ]
    if any(one["inside_per_step"] for one in found):
        rows.append(("bytes a step from the same node", lambda one: numbers.size(one["inside_per_step"])))
    return first + [[label, *(write(one) for one in found)] for label, write in rows]


def _what(run: Run) -> str:
    facts = run["facts"]
    config = facts["config"]
    return f"{facts['model_type']}, {numbers.count(facts['parameters'])} parameters, on {config['data']['train']}"


def _warnings(run: Run) -> list[str]:
    done, wanted = run["lines"][-1]["step"], run["facts"]["config"]["steps"]
    name, found = run["name"], []
    if done < wanted:
        found.append(f"{name} has done {done:,} of its {wanted:,} steps.")
    if not math.isfinite(run["lines"][-1]["loss"]):
        found.append(f"The last loss of {name} is not finite.")
    return found


def _figures(run: Run) -> Markup:
    one = summary(run)
    drawn = [
        figure("loss", numbers.metric(one["loss"]), f"after {one['steps']:,} steps"),
        figure("bytes a step", numbers.size(one["bytes_per_step"]), "that arrive at a worker"),
        figure("density", f"{100 * one['density']:.3g} %", f"build-up {one['build_up']:.3g}"),
        figure("time", numbers.seconds(one["seconds"]), f"{1000 * sum(one['phases'].values()):.3g} ms a step"),
    ]
    if one["held_out"]:
        drawn.insert(1, figure("held out", numbers.metric(one["held_out"]["loss"]), _held_out_words(one["held_out"])))
    return tag("div", *drawn, class_="figures")


def _key(runs: Sequence[Run]) -> Markup | None:
    return key_of([f"{run['name']} ({_method(run)})" for run in runs]) if len(runs) > 1 else None


def _series(runs: Sequence[Run], x: str, y: Callable[[Run], float | None]) -> list[Series]:
    found = []
    for run in runs:
        points: list[Point] = []
        for line in run["lines"]:
            value = y(line)
            if value is not None and math.isfinite(value):
                points.append((line[x], value))
        found.append(Series(str(run["name"]), thinned(points)[0]))
    return found


def _graph(title: str, series: list[Series], across: str, upright: str, **options: Any) -> Markup | None:
    points = [point for each in series for point in each.points]
    if not points:
        return None
    ends = [each.points[-1][0] for each in series if each.points]
    wide = max(ends) > _WIDE * min(ends)
    in_bytes = across.startswith("bytes")
    x: Scale = scale_of(
        across, [one for one, _ in points if one > 0], zero=True, wide=1.0 if wide else math.inf, bytes=in_bytes
    )
    y = scale_of(upright, [value for _, value in points], **options)
    return lines(title, series, x, y)


def _losses(runs: Sequence[Run]) -> list[Markup | None]:
    def held_out(line: Run) -> float | None:
        return (line.get("evaluation") or {}).get("loss")

    sends = any(line["all_bytes"] for run in runs for line in run["lines"])
    return [
        _graph("Loss against time", _series(runs, "seconds", lambda line: line["loss"]), "seconds", ""),
        _graph("Loss against bytes", _series(runs, "all_bytes", lambda line: line["loss"]), "bytes at a worker", "")
        if sends
        else None,
        _graph("Held-out loss against time", _series(runs, "seconds", held_out), "seconds", ""),
        _graph("Held-out loss against bytes", _series(runs, "all_bytes", held_out), "bytes at a worker", "")
        if sends
        else None,
    ]


def _sent(runs: Sequence[Run]) -> list[Markup | None]:
    parts = (
        ("Density", "density", {"wide": _WIDE}),
        ("Build-up", "build_up", {"zero": True}),
        ("Padding", "padding", {"zero": True}),
        ("Bytes", "bytes", {"wide": _WIDE, "zero": True, "bytes": True}),
    )
    return [
        _graph(title, _series(runs, "step", lambda line, key=key: line.get(key)), "step", "", **options)  # type: ignore[misc]
        for title, key, options in parts
    ]


def _thin_note(runs: Sequence[Run]) -> Markup | None:
    every = max(thinned([(0.0, 0.0)] * len(run["lines"]))[1] for run in runs)
    return note(f"A point is the mean of up to {every} steps.") if every > 1 else None


def _phases(runs: Sequence[Run]) -> Markup:
    means = {str(run["name"]): phase_means(run["lines"]) for run in runs}
    longest = max(sum(phases.values()) for phases in means.values()) or 1.0
    swatches = [
        tag("span", tag("span", class_=f"swatch part{number}"), phase, class_="entry")
        for number, phase in enumerate(PHASES)
    ]
    bars = [
        join(tag("h3", name) if len(runs) > 1 else None, stacked(list(phases.items()), longest))
        for name, phases in means.items()
    ]
    rows = [
        [name, *(f"{1000 * phases[phase]:.3f}" for phase in PHASES), f"{1000 * sum(phases.values()):.3f}"]
        for name, phases in means.items()
    ]
    return join(tag("p", *swatches, class_="soft runs"), *bars, table(("ms a step", *PHASES, "together"), rows))


def _phase_note(runs: Sequence[Run]) -> str:
    told = (
        "Means over all steps but the first, on the first worker. Reduce is choosing, packing and sending, with the "
        "time that this worker waits for the others; it is taken out of backward."
    )
    if any(_is_plain(run) for run in runs):
        told += " Plain DDP sends beside backward, so its sending is part of backward."
    if any(run["facts"].get("decision") for run in runs):
        told += " The steps in which auto measured are among those of its run."
    return told


def _is_plain(run: Run) -> bool:
    choices = (run["facts"].get("decision") or {}).get("choices")
    return run["facts"]["config"]["gradients"]["method"] == _PLAIN or (choices is not None and set(choices) == {_DENSE})


def _decision(run: Run) -> Markup | None:
    made = run["facts"].get("decision")
    if not made:
        return None
    rows = [
        [str(vector), each["method"], numbers.size(each["bytes"]), f"{1000 * each['exposed']:.3f}"]
        for vector, methods in enumerate(made["vectors"])
        for each in methods
    ]
    chosen = ", ".join(f"vector {number}: {method}" for number, method in enumerate(made["choices"]))
    told = note(f"Chosen: {chosen}. Without compression a step waits {1000 * made['uncompressed']['exposed']:.3f} ms.")
    headings = ("vector", "method", "bytes", "predicted wait, ms")
    return section(f"What auto measured for {run['name']}", told, table(headings, rows))


def _settings(run: Run) -> Markup:
    pairs = _flat(run["facts"]["config"])
    return tag("dl", *(join(tag("dt", key), tag("dd", numbers.plain(value))) for key, value in pairs))


def _flat(values: Run, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return [(key, value) for key, value in found if value is not None]


def _method(run: Run) -> str:
    given = dict(run["facts"]["config"]["gradients"])
    name = given.pop("method")
    return f"{name}:{','.join(f'{key}={value}' for key, value in given.items())}" if given else str(name)


def _held_out_words(found: Run | None) -> str:
    return ", ".join(f"{name} {numbers.metric(value)}" for name, value in found.items()) if found else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
