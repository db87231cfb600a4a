"""The load test page: headline figures, latencies over time and as distributions, throughput, failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.report import numbers, sections
from smelt.report.markup import Markup, section, table, tag, warning
from smelt.report.page import page
from smelt.report.plots import Axis, Point, curve, dots, steps
from smelt.report.summary import figure

Run = Mapping[str, Any]

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "late": "send delay",
}
_MAX_CURVE_POINTS = 400  # points drawn per distribution


def render_load(run: Run) -> str:
    """Render `settings`, `summary` and `series` of a load test."""
    summary = run["summary"]
    return page(
        f"Load test of {run['settings']['model']}",
        tag("header", tag("h1", f"Load test of {run['settings']['model']}"), tag("div", _line(run), class_="soft")),
        *_warnings(run),
        _figures(summary),
        section("Latency", _latencies(summary)),
        section("Over time", tag("div", *_over_time(run), class_="graphs")),
        section("Distributions", tag("div", *_distributions(run), class_="graphs")),
        _failures(summary),
        section("Settings", _settings(run["settings"])),
        sections.machine(run),
        tag("footer", "Written by Smelt."),
    )


def latency_rows(summary: Run) -> list[list[str]]:
    """Format name, mean, percentiles and maximum in milliseconds of every measured latency."""
    stats = [(name, summary.get(key)) for key, name in LATENCIES.items()]
    columns = ("mean", "p50", "p90", "p99", "max")
    return [[name, *(f"{latency[column]:,.1f}" for column in columns)] for name, latency in stats if latency]


def throughput_rows(summary: Run) -> list[list[str]]:
    rows = [
        ["requests answered", f"{summary['answered']:,} of {summary['requests']:,}"],
        ["duration", numbers.seconds(summary["seconds"])],
        ["requests per second", f"{summary['requests_per_second']:.2f}"],
        ["output tokens per second", f"{summary['output_tokens_per_second']:,.1f}"],
        ["total tokens per second", f"{summary['total_tokens_per_second']:,.1f}"],
        ["peak output tokens per second", f"{summary['peak_tokens_per_second']:,.0f}"],
        ["peak concurrent requests", f"{summary['peak_concurrency']:,}"],
    ]
    if summary["goodput"] is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in summary["limits"].items())
        rows.append([f"goodput ({limits})", f"{summary['goodput']:.2f}/s, {summary['good']:,} requests"])
    return rows + [[f"failed: {error}", f"{count:,}"] for error, count in summary["failures"].items()]


def _line(run: Run) -> str:
    settings = run["settings"]
    rate = "all requests at once" if settings["rate"] == "inf" else f"{settings['rate']:g} requests per second"
    return ", ".join(str(part) for part in (settings["url"], rate, run.get("created")) if part)


def _warnings(run: Run) -> list[Markup]:
    summary, warnings = run["summary"], []
    failed = summary["requests"] - summary["answered"]
    if failed:
        warnings.append(
            warning(f"{failed:,} of {summary['requests']:,} requests failed; they are not part of any latency.")
        )
    if run.get("stopped"):
        warnings.append(warning("The run was stopped early; only finished requests are included."))
    late = summary.get("late")
    if late and late["p90"] > 100:
        warnings.append(
            warning(
                f"One request in ten was sent {late['p90']:,.0f} ms or more after its scheduled time: the client was "
                "at its concurrency limit or overloaded; latencies are measured from the actual send."
            )
        )
    return warnings


def _figures(summary: Run) -> Markup:
    stats = [(name, summary[key]) for key, name in LATENCIES.items() if key in ("ttft", "tpot") and summary[key]]
    items = [
        figure("output tokens per second", f"{summary['output_tokens_per_second']:,.0f} tok/s",
               f"peak {summary['peak_tokens_per_second']:,.0f}"),
        figure("requests per second", f"{summary['requests_per_second']:.2f} req/s",
               f"{summary['answered']:,} of {summary['requests']:,} answered"),
        *(figure(name, f"{latency['p50']:,.1f} ms", "median", f"p99 {latency['p99']:,.1f} ms")
          for name, latency in stats),
    ]  # fmt: skip
    if summary["goodput"] is not None:
        items.append(
            figure("goodput", f"{summary['goodput']:.2f} req/s", f"{summary['good']:,} requests met all limits")
        )
    return tag("div", *items, class_="figures")


def _latencies(summary: Run) -> Markup:
    headings = ("milliseconds", "mean", "p50", "p90", "p99", "max")
    return table(headings, latency_rows(summary))


def _over_time(run: Run) -> list[Markup]:
    series, limits = run["series"], run["summary"]["limits"]
    last = max([run["summary"]["seconds"], 1e-3])
    graphs = []
    for key in ("ttft", "tpot"):
        points: Sequence[Point] = series[key]
        if points:
            y_axis = Axis("milliseconds", max(value for _, value in points), limits.get(key), "limit")
            graphs.append(dots(LATENCIES[key], points, Axis("seconds", last), y_axis))
    for key, title, y_name in (("tokens", "throughput", "output tokens per second"),
                               ("concurrency", "concurrency", "running requests")):  # fmt: skip
        points = series[key]
        if points:
            y_axis = Axis(y_name, max(value for _, value in points))
            graphs.append(steps(title, points, Axis("seconds", max(last, points[-1][0])), y_axis))
    return graphs


def _distributions(run: Run) -> list[Markup]:
    limits = run["summary"]["limits"]
    graphs = []
    for key, values in run["series"]["sorted"].items():
        if values:
            x_axis = Axis("milliseconds", values[-1], limits.get(key), "limit")
            share = Axis("cumulative share of requests", 1.0)
            graphs.append(curve(LATENCIES[key], _cumulative(values), x_axis, share))
    return graphs


def _cumulative(values: Sequence[float]) -> list[Point]:
    """Return the cumulative distribution, at no more points than can be seen."""
    count = len(values)
    indices = sorted({round(index * (count - 1) / (_MAX_CURVE_POINTS - 1)) for index in range(_MAX_CURVE_POINTS)})
    return [(values[0], 0.0), *((values[index], (index + 1) / count) for index in indices)]


def _failures(summary: Run) -> Markup | None:
    if not summary["failures"]:
        return None
    return section("Failures", table(("error", "requests"), ((k, f"{n:,}") for k, n in summary["failures"].items())))


def _settings(settings: Run) -> Markup:
    shown = {key: value for key, value in settings.items() if value is not None}
    return table(("setting", "value"), ((key.replace("_", " "), numbers.plain(value)) for key, value in shown.items()))
