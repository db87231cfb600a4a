"""The FSDP sharding page: times per unit and both timelines, predicted beside measured.

A plan is a plain dict: `name`, `world_size`, `units` (name, bytes, reshard_after_forward), `predicted` and
`measured` (seconds, exposed_seconds, peak_memory, and events as op type, unit, start, end; unit -1 is the root).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.report import numbers, sections
from smelt.report.charts import axis_below
from smelt.report.markup import Markup, join, note, section, table, tag
from smelt.report.page import page

OP_TYPES = ("all-gather", "forward", "backward", "reduce-scatter")
HEADINGS = ["unit", "size", "after forward", *(f"{op}, ms" for op in OP_TYPES)]
_LANES = (("compute", ("forward", "backward")), ("collectives", ("all-gather", "reduce-scatter")))
_ROOT = -1
_ROW = 22  # height of a lane
_NAMES = 96  # width of their names

PlanRecord = Mapping[str, Any]


def render_shard_plan(plan: PlanRecord) -> str:
    """Render the page."""
    title = f"Sharded training: {plan['name']}"
    return page(
        title,
        tag("header", tag("h1", title), tag("div", _subtitle(plan), class_="soft")),
        section("One step", table(["", "predicted", "measured"], step_rows(plan))),
        section(
            "Timeline", _legend(), *(_timeline(which, plan) for which in ("predicted", "measured")), note(_LANE_NOTE)
        ),
        section("Units", table(HEADINGS, unit_rows(plan)), note(_UNIT_NOTE)),
        section("Measured inputs", table(["", "value"], fact_rows(plan))),
        sections.machine(plan),
        tag("footer", "Written by Smelt."),
    )


_LANE_NOTE = "Rank 0. Both timelines have the same scale; the fastest of three measured steps is drawn."
_UNIT_NOTE = (
    "Each number is predicted / measured, over the whole step: a unit that is resharded after forward is gathered "
    "twice. Measured compute includes contention on the machine, which the prediction does not model."
)


def step_rows(plan: PlanRecord) -> list[list[str]]:
    """Summarize the step in three rows, for the page and the terminal."""
    both = [plan["predicted"], plan["measured"]]
    peaks = ["not measured" if each["peak_memory"] is None else numbers.size(each["peak_memory"]) for each in both]
    return [
        ["step time, ms", *(f"{1000 * each['seconds']:.3f}" for each in both)],
        ["exposed communication, ms", *(f"{1000 * each['exposed_seconds']:.3f}" for each in both)],
        ["peak memory per rank", *peaks],
    ]


def unit_rows(plan: PlanRecord) -> list[list[str]]:
    """Build one row per unit."""
    rows = []
    for index, unit in _units(plan):
        times = [[1000 * _total(plan[which], op, index) for which in ("predicted", "measured")] for op in OP_TYPES]
        after = "resharded" if unit["reshard_after_forward"] else "stays gathered"
        cells = [f"{predicted:.3f} / {measured:.3f}" for predicted, measured in times]
        rows.append([unit["name"], numbers.size(unit["bytes"]), after, *cells])
    return rows


def fact_rows(plan: PlanRecord) -> list[list[str]]:
    lines = [(kind, plan["cluster"][kind.replace("-", "_")]) for kind in ("all-gather", "reduce-scatter")]
    return [
        *(
            [f"{kind}: {1e6 * line['alpha']:.0f} us and, for every MB,", f"{1e9 * line['beta']:.3f} ms"]
            for kind, line in lines
        ),
        ["prefetched units in forward, in backward", f"{plan['forward_prefetch']}, {plan['backward_prefetch']}"],
        ["memory limit", "none" if plan["memory"] is None else numbers.size(plan["memory"])],
        ["collectives overlap compute", "yes" if plan["cluster"]["overlap"] else "no, FSDP2 waits on CPU"],
        ["search", "exhaustive" if plan["exhaustive"] else "hill climbing; there may be a better plan"],
    ]


def _subtitle(plan: PlanRecord) -> str:
    units = _units(plan)
    size = sum(unit["bytes"] for _, unit in units)
    return f"{numbers.size(size)} of parameters in {len(units)} units on {plan['world_size']} ranks"


def _units(plan: PlanRecord) -> list[tuple[int, Mapping[str, Any]]]:
    """List the units, with the root last if it has parameters."""
    root = plan["root"]
    return [*enumerate(plan["units"]), *([(_ROOT, {**root, "reshard_after_forward": False})] if root["bytes"] else [])]


def _total(timeline: Mapping[str, Any], op: str, unit: int) -> float:
    return sum(
        end - start for event_op, event_unit, start, end in timeline["events"] if (event_op, event_unit) == (op, unit)
    )


def _legend() -> Markup:
    entries = [tag("span", tag("span", class_=f"swatch {_class(op)}"), op, class_="entry") for op in OP_TYPES]
    return tag("p", *entries, class_="soft runs")


def _timeline(which: str, plan: PlanRecord) -> Markup:
    longest = max(plan[name]["seconds"] for name in ("predicted", "measured")) or 1.0
    names = dict(_units(plan)) | {_ROOT: {"name": plan["root"]["name"]}}
    lanes = [
        join(*(_bar(event, names, longest, row) for event in plan[which]["events"] if event[0] in ops))
        for row, (_, ops) in enumerate(_LANES)
    ]
    words = [tag("text", lane, x=0, y=row * _ROW + 15) for row, (lane, _) in enumerate(_LANES)]
    height = len(_LANES) * _ROW + 4
    return tag(
        "div",
        tag("h3", f"{which}, {1000 * plan[which]['seconds']:.3f} ms"),
        tag(
            "div",
            tag("svg", *words, width=_NAMES, height=height, aria_hidden="true"),
            tag("svg", tag("title", f"{which} timeline"), *lanes, width="100%", height=height, role="img"),
            tag("span"),
            axis_below(1000 * longest, "milliseconds"),
            style=f"display: grid; grid-template-columns: {_NAMES}px minmax(0, 1fr)",
        ),
    )


def _bar(event: Sequence[Any], names: Mapping[int, Mapping[str, Any]], longest: float, row: int) -> Markup:
    op, unit, start, end = event
    title = tag("title", f"{op} of {names[unit]['name']}: {1000 * (end - start):.3f} ms")
    left, width = 100 * start / longest, 100 * (end - start) / longest
    box = {"x": f"{left:.3f}%", "y": row * _ROW + 2, "width": f"{width:.3f}%", "height": _ROW - 4}
    return tag("rect", title, class_=_class(op), **box)


def _class(op: str) -> str:
    return f"part{OP_TYPES.index(op) + 1}"
