"""The training page: loss against time and bytes, traffic, and time per phase, for one run or several.

A run is a plain dict with a `name`, the `metadata` of its `run.json` and the `log` of its `run.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from smelt.report import numbers, sections
from smelt.report.charts import axis_below
from smelt.report.markup import Markup, join, note, section, table, tag, warning
from smelt.report.page import page
from smelt.report.plots import Point, Scale, Series, downsample, legend, lines, make_scale, stacked
from smelt.report.rows import Run
from smelt.report.summary import figure

PHASES = ("data", "forward", "backward", "reduce", "optimizer")
_LOG_RATIO = 30.0  # an axis that spans more than this factor is logarithmic
_PLAIN, _DENSE = "none", "dense"  # no compressor, and the name `auto` gives it


def render_training(runs: Sequence[Run]) -> str:
    """Render the page; every run must have at least one line."""
    title = f"Training: {', '.join(str(run['name']) for run in runs)}"
    return page(
        title,
        tag("header", tag("h1", title), tag("div", _subtitle(runs[0]), class_="soft")),
        *(warning(text) for run in runs for text in _warnings(run)),
        _figures(runs[0]) if len(runs) == 1 else None,
        section("Loss", _legend(runs), tag("div", *_losses(runs), class_="graphs"), _downsample_note(runs)),
        section("Traffic", _legend(runs), tag("div", *_traffic(runs), class_="graphs"), note(_TRAFFIC_NOTE)),
        section("Step time by phase", _phases(runs), note(_phase_note(runs))),
        section("Facts", table(["", *(str(run["name"]) for run in runs)], fact_rows(runs))),
        *(_decision(run) for run in runs),
        *(section(f"Configuration of {run['name']}", _settings(run)) for run in runs),
        sections.machine(runs[0]["metadata"]),
        tag("footer", "Written by Smelt."),
    )


_TRAFFIC_NOTE = (
    "Bytes are received per rank, averaged over ranks, assuming ring collectives. Build-up is the number of elements "
    "sent relative to the target density; padding is what the all-gather of indices carries beyond the selection."
)


def summary(run: Run) -> dict[str, Any]:
    """Summarize a run."""
    steps = run["log"]
    last = steps[-1]
    evaluations = [line["evaluation"] for line in steps if line.get("evaluation")]
    padding = [line["padding"] for line in steps if line.get("padding") is not None]
    return {
        "steps": last["step"],
        "seconds": last["seconds"],
        "loss": last["loss"],
        "held_out": evaluations[-1] if evaluations else None,
        "best_held_out_loss": min((evaluation["loss"] for evaluation in evaluations), default=None),
        "bytes": last["total_bytes"],
        "bytes_per_step": _mean([line["bytes"] for line in steps]),
        "intra_node_bytes_per_step": _mean([line["intra_node_bytes"] for line in steps]),
        "density": _mean([line["density"] for line in steps]),
        "build_up": _mean([line["build_up"] for line in steps]),
        "padding": _mean(padding) if padding else None,
        "skipped": sum(bool(line["skipped"]) for line in steps),
        "phases": phase_means(steps),
    }


def phase_means(steps: Sequence[Run]) -> dict[str, float]:
    """Average the seconds per phase; the first step is warmup and left out if there are others."""
    counted = steps[1:] or steps
    return {phase: _mean([line["phases"][phase] for line in counted]) for phase in PHASES}


def fact_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Build one row per fact and one column per run, for the page and the terminal."""
    summaries = [summary(run) for run in runs]
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("steps", lambda summary: numbers.count(summary["steps"])),
        ("seconds", lambda summary: numbers.seconds(summary["seconds"])),
        ("time per step", lambda summary: f"{1000 * sum(summary['phases'].values()):.3g} ms"),
        ("last loss", lambda summary: numbers.metric(summary["loss"])),
        ("final held-out metrics", lambda summary: _evaluation_text(summary["held_out"])),
        ("bytes received per rank", lambda summary: numbers.size(summary["bytes"])),
        ("bytes per step", lambda summary: numbers.size(summary["bytes_per_step"])),
        ("mean density", lambda summary: f"{summary['density']:.3g}"),
        ("mean build-up", lambda summary: f"{summary['build_up']:.3g}"),
        ("mean padding", lambda summary: "-" if summary["padding"] is None else f"{summary['padding']:.3g}"),
        ("skipped steps", lambda summary: numbers.count(summary["skipped"])),
    ]
    first = [
        ["precision", *(str(run["metadata"]["config"].get("precision", "off")) for run in runs)],
        ["gradients", *(_method(run) for run in runs)],
        ["ranks", *(f"{run['metadata']['world_size']}, {run['metadata']['backend']}" for run in runs)],
        ["parameters", *(numbers.count(run["metadata"]["parameters"]) for run in runs)],
    ]
    if any(item["intra_node_bytes_per_step"] for item in summaries):
        rows.append(("intra-node bytes per step", lambda summary: numbers.size(summary["intra_node_bytes_per_step"])))
    low_precision = [run["metadata"].get("low_precision") for run in runs]
    if any(low_precision):
        first.append(["GEMM FLOPs in FP8", *(_fp8_share(facts) for facts in low_precision)])
    return first + [[label, *(write(item) for item in summaries)] for label, write in rows]


def _fp8_share(facts: Run | None) -> str:
    if not facts:
        return "-"
    emulated = f", {100 * facts['emulated']:.1f} % emulated" if facts["emulated"] else ""
    return f"{100 * facts['fp8']:.1f} %{emulated}"


def _subtitle(run: Run) -> str:
    facts = run["metadata"]
    config = facts["config"]
    return f"{facts['model_type']}, {numbers.count(facts['parameters'])} parameters, on {config['data']['train']}"


def _warnings(run: Run) -> list[str]:
    done, total = run["log"][-1]["step"], run["metadata"]["config"]["steps"]
    name, warnings = run["name"], []
    if done < total:
        warnings.append(f"{name} has finished {done:,} of {total:,} steps.")
    if not math.isfinite(run["log"][-1]["loss"]):
        warnings.append(f"The last loss of {name} is not finite.")
    return warnings


def _figures(run: Run) -> Markup:
    totals = summary(run)
    figures = [
        figure("loss", numbers.metric(totals["loss"]), f"after {totals['steps']:,} steps"),
        figure("bytes per step", numbers.size(totals["bytes_per_step"]), "received per rank"),
        figure("density", f"{100 * totals['density']:.3g} %", f"build-up {totals['build_up']:.3g}"),
        figure("time", numbers.seconds(totals["seconds"]), f"{1000 * sum(totals['phases'].values()):.3g} ms per step"),
    ]
    if totals["held_out"]:
        figures.insert(
            1, figure("held out", numbers.metric(totals["held_out"]["loss"]), _evaluation_text(totals["held_out"]))
        )
    return tag("div", *figures, class_="figures")


def _legend(runs: Sequence[Run]) -> Markup | None:
    return legend([f"{run['name']} ({_method(run)})" for run in runs]) if len(runs) > 1 else None


def _series(runs: Sequence[Run], x: str, y: Callable[[Run], float | None]) -> list[Series]:
    series = []
    for run in runs:
        points: list[Point] = []
        for line in run["log"]:
            value = y(line)
            if value is not None and math.isfinite(value):
                points.append((line[x], value))
        series.append(Series(str(run["name"]), downsample(points)[0]))
    return series


def _graph(title: str, series: list[Series], x_name: str, y_name: str, **options: Any) -> Markup | None:
    points = [point for each in series for point in each.points]
    if not points:
        return None
    ends = [each.points[-1][0] for each in series if each.points]
    logarithmic = max(ends) > _LOG_RATIO * min(ends)
    in_bytes = x_name.startswith("bytes")
    x: Scale = make_scale(
        x_name,
        [px for px, _ in points if px > 0],
        zero=True,
        log_ratio=1.0 if logarithmic else math.inf,
        bytes=in_bytes,
    )
    y = make_scale(y_name, [value for _, value in points], **options)
    return lines(title, series, x, y)


def _losses(runs: Sequence[Run]) -> list[Markup | None]:
    def held_out(line: Run) -> float | None:
        return (line.get("evaluation") or {}).get("loss")

    has_traffic = any(line["total_bytes"] for run in runs for line in run["log"])
    return [
        _graph("Loss against step", _series(runs, "step", lambda line: line["loss"]), "step", "training loss"),
        _graph("Loss against time", _series(runs, "seconds", lambda line: line["loss"]), "seconds", "training loss"),
        _graph(
            "Loss against bytes",
            _series(runs, "total_bytes", lambda line: line["loss"]),
            "bytes received per rank",
            "training loss",
        )
        if has_traffic
        else None,
        _graph("Held-out loss against time", _series(runs, "seconds", held_out), "seconds", "held-out loss"),
        _graph(
            "Held-out loss against bytes",
            _series(runs, "total_bytes", held_out),
            "bytes received per rank",
            "held-out loss",
        )
        if has_traffic
        else None,
    ]


def _traffic(runs: Sequence[Run]) -> list[Markup | None]:
    parts = (
        ("Density", "density", "share of elements sent", {"log_ratio": _LOG_RATIO}),
        ("Build-up", "build_up", "elements sent / target", {"zero": True}),
        ("Padding", "padding", "padding / selection", {"zero": True}),
        ("Bytes", "bytes", "bytes per step", {"log_ratio": _LOG_RATIO, "zero": True, "bytes": True}),
    )
    return [
        _graph(title, _series(runs, "step", lambda line, key=key: line.get(key)), "step", y_name, **options)  # type: ignore[misc]
        for title, key, y_name, options in parts
    ]


def _downsample_note(runs: Sequence[Run]) -> Markup | None:
    stride = max(downsample([(0.0, 0.0)] * len(run["log"]))[1] for run in runs)
    return note(f"A point is the mean of up to {stride} steps.") if stride > 1 else None


def _phases(runs: Sequence[Run]) -> Markup:
    means = {str(run["name"]): phase_means(run["log"]) for run in runs}
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
    below = axis_below(1000 * longest, "milliseconds per step")
    return join(tag("p", *swatches, class_="soft runs"), *bars, below, table(("ms per step", *PHASES, "total"), rows))


def _phase_note(runs: Sequence[Run]) -> str:
    text = (
        "Means over all steps but the first, on rank 0. Reduce is selecting, encoding and sending, including the wait "
        "for other ranks; it is not counted in backward."
    )
    if any(_is_plain(run) for run in runs):
        text += " Plain DDP overlaps communication with backward, so it is counted there."
    if any(run["metadata"].get("decision") for run in runs):
        text += " The run with auto includes its measuring steps."
    return text


def _is_plain(run: Run) -> bool:
    choices = (run["metadata"].get("decision") or {}).get("choices")
    return run["metadata"]["config"]["gradients"]["method"] == _PLAIN or (
        choices is not None and set(choices) == {_DENSE}
    )


def _decision(run: Run) -> Markup | None:
    decision = run["metadata"].get("decision")
    if not decision:
        return None
    rows = [
        [str(bucket), each["method"], numbers.size(each["bytes"]), f"{1000 * each['exposed']:.3f}"]
        for bucket, methods in enumerate(decision["buckets"])
        for each in methods
    ]
    chosen = ", ".join(f"bucket {number}: {method}" for number, method in enumerate(decision["choices"]))
    summary_note = note(
        f"Chosen: {chosen}. Without compression a step waits {1000 * decision['uncompressed']['exposed']:.3f} ms."
    )
    headings = ("bucket", "method", "bytes", "predicted exposed communication, ms")
    return section(f"Measurements of auto for {run['name']}", summary_note, table(headings, rows))


def _settings(run: Run) -> Markup:
    pairs = _flat(run["metadata"]["config"])
    return tag("dl", *(join(tag("dt", key), tag("dd", numbers.plain(value))) for key, value in pairs))


def _flat(values: Run, prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return [(key, value) for key, value in pairs if value is not None]


def _method(run: Run) -> str:
    settings = dict(run["metadata"]["config"]["gradients"])
    name = settings.pop("method")
    return f"{name}:{','.join(f'{key}={value}' for key, value in settings.items())}" if settings else str(name)


def _evaluation_text(metrics: Run | None) -> str:
    return ", ".join(f"{name} {numbers.metric(value)}" for name, value in metrics.items()) if metrics else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
