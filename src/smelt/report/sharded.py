"""The page of a plan for sharded training: each unit's times and both timelines, predicted beside measured.

A plan is a plain dict: `name`, `workers`, `units` (name, bytes, reshard), `predicted` and `measured` (seconds, exposed,
peak, and events as kind, unit, start, end; unit -1 is the root), and what else is told of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.report import numbers, sections
from smelt.report.elements import note, section, table
from smelt.report.markup import Markup, join, tag
from smelt.report.page import page

KINDS = ("gather", "forward", "backward", "scatter")
HEADINGS = ["unit", "size", "after forward", *(f"{kind}, ms" for kind in KINDS)]
_LANES = (("computing", ("forward", "backward")), ("collectives", ("gather", "scatter")))
_ROOT = -1
_ROW = 22  # height of a lane
_NAMES = 96  # width of their names

Plan = Mapping[str, Any]


def render_shard_plan(plan: Plan) -> str:
    """The page."""
    title = f"Sharded training: {plan['name']}"
    return page(
        title,
        tag("header", tag("h1", title), tag("div", _what(plan), class_="soft")),
        section("One step", table(["", "predicted", "measured"], step_rows(plan))),
        section("Timeline", _key(), *(_timeline(which, plan) for which in ("predicted", "measured")), note(_LANE_NOTE)),
        section("Units", table(HEADINGS, unit_rows(plan)), note(_UNIT_NOTE)),
        section("What was measured before", table(["", "value"], fact_rows(plan))),
        sections.machine(plan),
        tag("footer", "Written by Smelt."),
    )


_LANE_NOTE = "The first worker. Both timelines have the same scale; the fastest of three measured steps is drawn."
_UNIT_NOTE = (
    "Each number is predicted / measured, of the whole step: a unit that is given back after forward is gathered "
    "twice. Measured computing waits for a busy machine, which a prediction does not know."
)


def step_rows(plan: Plan) -> list[list[str]]:
    """The step in three numbers, for the page and for the terminal."""
    both = [plan["predicted"], plan["measured"]]
    peaks = ["not measured" if each["peak"] is None else numbers.size(each["peak"]) for each in both]
    return [
        ["a step, ms", *(f"{1000 * each['seconds']:.3f}" for each in both)],
        ["nothing is computed, ms", *(f"{1000 * each['exposed']:.3f}" for each in both)],
        ["memory of a worker at most", *peaks],
    ]


def unit_rows(plan: Plan) -> list[list[str]]:
    """A row a unit."""
    rows = []
    for place, unit in _units(plan):
        times = [[1000 * _total(plan[which], kind, place) for which in ("predicted", "measured")] for kind in KINDS]
        after = "given back" if unit["reshard_after_forward"] else "stays whole"
        cells = [f"{one:.3f} / {two:.3f}" for one, two in times]
        rows.append([unit["name"], numbers.size(unit["bytes"]), after, *cells])
    return rows


def fact_rows(plan: Plan) -> list[list[str]]:
    lines = [(kind, plan["machines"][kind]) for kind in ("gather", "scatter")]
    return [
        *(
            [f"{kind}: {1e6 * line['alpha']:.0f} us and, for every MB,", f"{1e9 * line['beta']:.3f} ms"]
            for kind, line in lines
        ),
        ["units gathered ahead in forward, in backward", f"{plan['forward_prefetch']}, {plan['backward_prefetch']}"],
        ["memory that was allowed", "any" if plan["memory"] is None else numbers.size(plan["memory"])],
        ["collectives run beside computing", "yes" if plan["machines"]["beside"] else "no, FSDP2 waits on a CPU"],
        ["search", "all plans were tried" if plan["exhaustive"] else "climbed; there may be a better plan"],
    ]


def _what(plan: Plan) -> str:
    units = _units(plan)
    size = sum(unit["bytes"] for _, unit in units)
    return f"{numbers.size(size)} of parameters in {len(units)} units on {plan['workers']} workers"


def _units(plan: Plan) -> list[tuple[int, Mapping[str, Any]]]:
    """The root last, if it has anything."""
    root = plan["root"]
    return [*enumerate(plan["units"]), *([(_ROOT, {**root, "reshard_after_forward": False})] if root["bytes"] else [])]


def _total(timeline: Mapping[str, Any], kind: str, unit: int) -> float:
    return sum(end - start for what, place, start, end in timeline["events"] if (what, place) == (kind, unit))


def _key() -> Markup:
    entries = [tag("span", tag("span", class_=f"swatch {_class(kind)}"), kind, class_="entry") for kind in KINDS]
    return tag("p", *entries, class_="soft runs")


def _timeline(which: str, plan: Plan) -> Markup:
    longest = max(plan[name]["seconds"] for name in ("predicted", "measured")) or 1.0
    names = dict(_units(plan)) | {_ROOT: {"name": plan["root"]["name"]}}
    lanes = [
        join(*(_bar(event, names, longest, row) for event in plan[which]["events"] if event[0] in kinds))
        for row, (_, kinds) in enumerate(_LANES)
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
            style=f"display: grid; grid-template-columns: {_NAMES}px minmax(0, 1fr)",
        ),
    )


def _bar(event: Sequence[Any], names: Mapping[int, Mapping[str, Any]], longest: float, row: int) -> Markup:
    kind, unit, start, end = event
    title = tag("title", f"{kind} of {names[unit]['name']}: {1000 * (end - start):.3f} ms")
    at, width = 100 * start / longest, 100 * (end - start) / longest
    place = {"x": f"{at:.3f}%", "y": row * _ROW + 2, "width": f"{width:.3f}%", "height": _ROW - 4}
    return tag("rect", title, class_=_class(kind), **place)


def _class(kind: str) -> str:
    return f"part{KINDS.index(kind) + 1}"
