"""The comparison page: several compression runs side by side, from the records that `smelt compress` writes.

A run is a plain dict, the record of a run with the `name` of its folder. Quality and speed were measured against the
source model in each run, so runs are compared by their change: values of two runs on different data, or times measured
at different moments, are not comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from smelt.report import numbers, sections
from smelt.report.charts import Bar, axis_below, bar
from smelt.report.markup import Markup, details, join, section, table, tag, warning
from smelt.report.page import page
from smelt.report.plots import Labeled, make_scale, scatter
from smelt.report.rows import (
    Run,
    factor,
    interval_text,
    quality_change,
    relative_change,
    short_path,
    speed_label,
    speedup,
    speedup_text,
)

SOURCE = "source"  # the name of the model before any compression
Writer = Callable[[float], str]
Row = tuple[str, str, list[str]]  # label, the source model, each run
_SIZES: dict[str, tuple[str, Writer]] = {
    "bytes": ("weight bytes", numbers.size),
    "parameters": ("parameters", numbers.count),
    "macs": ("MACs", numbers.macs),
}


def render_comparison(runs: Sequence[Run]) -> str:
    """Render the page; every run has a `name`."""
    title = f"Comparison: {', '.join(str(run['name']) for run in runs)}"
    subtitle = ", ".join(dict.fromkeys(f"source model {short_path(str(run['model']))}" for run in runs))
    return page(
        title,
        tag("header", tag("h1", title), tag("div", subtitle, class_="soft")),
        *(warning(text) for text in differences(runs)),
        section("Summary", tag("div", table(headings(runs), comparison_rows(runs)), class_="scrolled runs-table")),
        _trade_off(runs),
        _bars(runs),
        _samples(runs),
        section("Recipes", *(details(str(run["name"]), tag("pre", run.get("recipe", ""))) for run in runs)),
        *_machines(runs),
        tag("footer", "Written by Smelt."),
    )


def differences(runs: Sequence[Run]) -> list[str]:
    """Say what is not the same in all runs, and so limits what can be compared."""
    facts: dict[str, Callable[[Run], Any]] = {
        "source models, so sizes are not relative to the same model": lambda run: run["model"],
        "evaluation data or settings, so quality is not comparable": _quality_conditions,
        "machines, so speedups are not comparable": lambda run: (run.get("machine") or {}).get("cpu"),
    }
    return [
        f"The runs have different {text}." for text, read in facts.items() if len({str(read(run)) for run in runs}) > 1
    ]


def comparison_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Build one row per quantity, under `headings`: the source model, if all have the same, then every run."""
    rows = [("steps", "", [_steps_text(run) for run in runs]), *_quality_rows(runs), *_size_rows(runs)]
    for label in _speed_labels(runs):
        speeds = [_speed_entry(run, label) for run in runs]
        rows.append((label, "", ["–" if entry is None else speedup_text(entry) for entry in speeds]))
    return [[label, *([source] if _same_source(runs) else []), *cells] for label, source, cells in rows]


def headings(runs: Sequence[Run]) -> list[str]:
    """Return the headings of `comparison_rows`."""
    return ["", *([SOURCE] if _same_source(runs) else []), *(str(run["name"]) for run in runs)]


def _same_source(runs: Sequence[Run]) -> bool:
    return len({str(run["model"]) for run in runs}) == 1


def _quality_rows(runs: Sequence[Run]) -> list[Row]:
    metrics = {str(run["quality"]["metric"]) for run in runs if run.get("quality")}
    if not metrics:
        return []
    metric = metrics.pop() if len(metrics) == 1 else "quality, each by its own metric"
    before = numbers.metric(runs[0]["quality"]["before"]) if runs[0].get("quality") else ""
    intervals = [_interval(run) for run in runs]
    rows = [(metric, before, [_quality_text(run) for run in runs])]
    return rows + ([("interval of the change", "", intervals)] if any(intervals) else [])


def _size_rows(runs: Sequence[Run]) -> list[Row]:
    rows = []
    for key, (label, write) in _SIZES.items():
        pairs = [(run.get("size") or {}).get(key) for run in runs]
        if any(pair and write(pair["before"]) != write(pair["after"]) for pair in pairs):
            source = write(pairs[0]["before"]) if pairs[0] else ""
            rows.append((label, source, [_size_text(pair, write) for pair in pairs]))
    return rows


def _speed_labels(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(speed_label(entry) for run in runs for entry in run.get("speed") or []))


def _speed_entry(run: Run, label: str) -> Run | None:
    return next((entry for entry in run.get("speed") or [] if speed_label(entry) == label), None)


def _quality_conditions(run: Run) -> Any:
    quality = run.get("quality") or {}
    return [quality.get(key) for key in ("metric", "data", "settings", "before")]


def _quality_text(run: Run) -> str:
    quality = run.get("quality") or {}
    return f"{numbers.metric(quality['after'])}, {quality_change(quality)}" if quality else "–"


def _interval(run: Run) -> str:
    comparison = (run.get("quality") or {}).get("comparison") or {}
    relative = interval_text(comparison, lambda ratio: numbers.percent(ratio - 1), "ratio_")
    return relative or interval_text(comparison, numbers.signed)


def _size_text(pair: Run | None, write: Writer) -> str:
    if not pair:
        return "–"
    change = relative_change(pair["before"], pair["after"])
    return f"{write(pair['after'])}, {change}" if write(pair["before"]) != write(pair["after"]) else "unchanged"


def _steps_text(run: Run) -> str:
    return ", ".join(str(step.get("name", "")) for step in run.get("steps") or []) or "–"


def _trade_off(runs: Sequence[Run]) -> Markup | None:
    """Draw quality against weight bytes: the source model and every run."""
    shown = [run for run in runs if run.get("quality") and (run.get("size") or {}).get("bytes")]
    if len(shown) < 2 or len({str(_quality_conditions(run)) for run in shown}) > 1:
        return None
    first = shown[0]
    points = [Labeled(str(run["name"]), run["size"]["bytes"]["after"], run["quality"]["after"]) for run in shown]
    points.insert(0, Labeled(SOURCE, first["size"]["bytes"]["before"], first["quality"]["before"], hollow=True))
    better = "higher is better" if first["quality"].get("higher_is_better", True) else "lower is better"
    x = make_scale("weight bytes (smaller is better)", [point.x for point in points], zero=True, bytes=True)
    y = make_scale(f"{first['quality']['metric']} ({better})", [point.y for point in points])
    return section("Quality against size", scatter(points, x, y))


def _bars(runs: Sequence[Run]) -> Markup | None:
    """Draw what is left of every size and the speedup, relative to the source model."""
    charts: list[Markup] = []
    for key, (label, write) in _SIZES.items():
        pairs = {str(run["name"]): (run.get("size") or {}).get(key) for run in runs}
        known = {name: pair for name, pair in pairs.items() if pair and pair["before"]}
        if any(write(pair["before"]) != write(pair["after"]) for pair in known.values()):
            shares = {name: (pair["after"] / pair["before"], write(pair["after"])) for name, pair in known.items()}
            charts.append(_bar_chart(label, shares, "share of the source model"))
    for label in _speed_labels(runs):
        entries = {str(run["name"]): _speed_entry(run, label) for run in runs}
        speeds = {name: (speedup(entry), factor(speedup(entry))) for name, entry in entries.items() if entry}
        charts.append(_bar_chart(label, speeds, "speedup over the source model"))
    return section("Size and speed", *charts) if charts else None


def _bar_chart(title: str, values: dict[str, tuple[float, str]], axis_title: str) -> Markup:
    """Draw a bar for each run on a scale on which the source model is 1."""
    longest = max(1.0, *(value for value, _ in values.values()))
    lines = [
        markup
        for name, (value, text) in values.items()
        for markup in (
            tag("span", name, class_="soft"),
            bar(Bar(value, 0.0, "after", f"{name}: {text}"), longest),
            tag("span", text, class_="count"),
        )
    ]
    below = [tag("span"), axis_below(longest, axis_title), tag("span")]
    return join(tag("h3", title), tag("div", *lines, *below, class_="timing named"))


def _machines(runs: Sequence[Run]) -> list[Markup | None]:
    """List hardware and versions once, or of every run if they differ."""
    if len({str(run.get("machine")) for run in runs}) == 1:
        return [sections.machine(runs[0])]
    return [sections.machine(run, f"{run['name']} was measured on") for run in runs]


def _samples(runs: Sequence[Run]) -> Markup | None:
    """Show every prompt completed by the source model and by each run, or the predictions for some items."""
    prompts = list(dict.fromkeys(str(sample["prompt"]) for run in runs for sample in run.get("samples") or []))
    groups = [tag("div", *_completions(runs, prompt), class_="samples many") for prompt in prompts]
    if groups:
        return section("Sample completions", *groups)
    items = [run.get("predictions") or [] for run in runs]
    if not all(items) or len({str([item["text"] for item in each]) for each in items}) > 1:
        return None
    rows = [
        [
            tag("div", item["text"], class_="item"),
            numbers.plain(item["label"]),
            numbers.plain(item["before"]),
            *(numbers.plain(each[number]["after"]) for each in items),
        ]
        for number, item in enumerate(items[0])
    ]
    names = [str(run["name"]) for run in runs]
    return section("Sample predictions", table(("text", "label", SOURCE, *names), rows))


def _completions(runs: Sequence[Run], prompt: str) -> list[Markup]:
    quotes: list[Markup] = []
    for run in runs:
        for sample in run.get("samples") or []:
            if str(sample["prompt"]) == prompt:
                if sample["who"] == "before" and not quotes:
                    quotes.append(sections.quote(SOURCE, sample))
                if sample["who"] == "after":
                    quotes.append(sections.quote(str(run["name"]), sample))
    return quotes
