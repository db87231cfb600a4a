"""The page of a load test: the figures, every latency over time and as a distribution, tokens a second, failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.report import numbers, sections
from smelt.report.elements import section, table, warning
from smelt.report.figures import figure
from smelt.report.graphs import Axis, Point, curve, spots, steps
from smelt.report.markup import Markup, tag
from smelt.report.page import page

Run = Mapping[str, Any]

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between pieces",
    "e2el": "whole answer",
    "late": "sent after it was due",
}
_CURVE = 400  # points of a distribution that are drawn


def render_load(run: Run) -> str:
    """`settings` and `summary` as the load test has them; `series` with the points of every graph."""
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
    """Name, mean, percentiles and maximum in milliseconds, of the latencies that there are."""
    found = [(name, summary.get(key)) for key, name in LATENCIES.items()]
    kinds = ("mean", "p50", "p90", "p99", "largest")
    return [[name, *(f"{spread[kind]:,.1f}" for kind in kinds)] for name, spread in found if spread]


def throughput_rows(summary: Run) -> list[list[str]]:
    rows = [
        ["requests answered", f"{summary['answered']:,} of {summary['requests']:,}"],
        ["duration", numbers.seconds(summary["seconds"])],
        ["requests a second", f"{summary['requests_per_second']:.2f}"],
        ["output tokens a second", f"{summary['output_tokens_per_second']:,.1f}"],
        ["all tokens a second", f"{summary['total_tokens_per_second']:,.1f}"],
        ["output tokens in the best second", f"{summary['peak_tokens_per_second']:,.0f}"],
        ["requests at once, at most", f"{summary['most_at_once']:,}"],
    ]
    if summary["goodput"] is not None:
        kept = ", ".join(f"{name} {limit:g} ms" for name, limit in summary["limits"].items())
        rows.append([f"goodput ({kept})", f"{summary['goodput']:.2f}/s, {summary['good']:,} requests"])
    return rows + [[f"failed: {kind}", f"{count:,}"] for kind, count in summary["failures"].items()]


def _line(run: Run) -> str:
    settings = run["settings"]
    rate = "all requests at once" if settings["rate"] == "inf" else f"{settings['rate']:g} requests a second"
    return ", ".join(str(part) for part in (settings["url"], rate, run.get("created")) if part)


def _warnings(run: Run) -> list[Markup]:
    summary, found = run["summary"], []
    failed = summary["requests"] - summary["answered"]
    if failed:
        found.append(warning(f"{failed:,} of {summary['requests']:,} requests failed; no latency counts them."))
    if run.get("stopped"):
        found.append(warning("The run was stopped before its end; only requests that had ended are in it."))
    late = summary.get("late")
    if late and late["p90"] > 100:
        found.append(
            warning(
                f"One request in ten was sent {late['p90']:,.0f} ms or more after it was due: the client waited for "
                "its turn or was too busy, and latencies are those after sending."
            )
        )
    return found


def _figures(summary: Run) -> Markup:
    spreads = [(name, summary[key]) for key, name in LATENCIES.items() if key in ("ttft", "tpot") and summary[key]]
    drawn = [
        figure("output tokens a second", f"{summary['output_tokens_per_second']:,.0f} tok/s",
               f"best second {summary['peak_tokens_per_second']:,.0f}"),
        figure("requests a second", f"{summary['requests_per_second']:.2f} req/s",
               f"{summary['answered']:,} of {summary['requests']:,} answered"),
        *(figure(name, f"{spread['p50']:,.1f} ms", "median", f"99 of 100 within {spread['p99']:,.1f} ms")
          for name, spread in spreads),
    ]  # fmt: skip
    if summary["goodput"] is not None:
        drawn.append(figure("goodput", f"{summary['goodput']:.2f} req/s", f"{summary['good']:,} requests kept to all"))
    return tag("div", *drawn, class_="figures")


def _latencies(summary: Run) -> Markup:
    headings = ("milliseconds", "mean", "median", "90 %", "99 %", "largest")
    return table(headings, latency_rows(summary))


def _over_time(run: Run) -> list[Markup]:
    series, limits = run["series"], run["summary"]["limits"]
    last = max([run["summary"]["seconds"], 1e-3])
    graphs = []
    for key in ("ttft", "tpot"):
        points: Sequence[Point] = series[key]
        if points:
            upright = Axis("ms", max(value for _, value in points), limits.get(key), "limit")
            graphs.append(spots(LATENCIES[key], points, Axis("seconds", last), upright))
    for key, title in (("tokens", "output tokens each second"), ("under_way", "requests under way")):
        points = series[key]
        if points:
            upright = Axis("", max(value for _, value in points))
            graphs.append(steps(title, points, Axis("seconds", max(last, points[-1][0])), upright))
    return graphs


def _distributions(run: Run) -> list[Markup]:
    limits = run["summary"]["limits"]
    graphs = []
    for key, values in run["series"]["sorted"].items():
        if values:
            across = Axis("ms", values[-1], limits.get(key), "limit")
            share = Axis("share at most so long", 1.0)
            graphs.append(curve(LATENCIES[key], _cumulative(values), across, share))
    return graphs


def _cumulative(values: Sequence[float]) -> list[Point]:
    """The share of values up to each, at no more places than can be seen."""
    count = len(values)
    picked = sorted({round(place * (count - 1) / (_CURVE - 1)) for place in range(_CURVE)})
    return [(values[0], 0.0), *((values[place], (place + 1) / count) for place in picked)]


def _failures(summary: Run) -> Markup | None:
    if not summary["failures"]:
        return None
    return section("Failures", table(("kind", "requests"), ((k, f"{n:,}") for k, n in summary["failures"].items())))


def _settings(settings: Run) -> Markup:
    shown = {key: value for key, value in settings.items() if value is not None}
    return table(("setting", "value"), ((key.replace("_", " "), numbers.plain(value)) for key, value in shown.items()))
