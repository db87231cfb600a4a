"""The page of `smelt sensitivity`: what each layer, head, group of channels and expert costs to remove.

Its content is a plain dict: `model`, `data`, `samples`, `sample` (what one sample is), `loss`, `channel_groups`,
`measure` (removal, or hessian with its `probes`) and `removals` (kind, block, name, index, parameters, increase, error,
why_not).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.report import numbers, sections
from smelt.report.markup import Markup, note, section, table, tag
from smelt.report.page import page
from smelt.report.rows import short_path

Content = Mapping[str, Any]
Entry = Mapping[str, Any]

TITLES = {"layers": "Layers", "parts": "Attention and feed-forward", "heads": "Heads", "channels": "Channels",
          "experts": "Experts"}  # fmt: skip
_NOTES = {
    "layers": "A removed layer returns its input.",
    "parts": "All heads or all channels of a layer are removed; the bias of the output projection stays.",
    "heads": "One column per head; with grouped-query attention, per KV head with its query heads.",
    "channels": "One column per group of channels of equal size, by the sum of their absolute weights, the smallest "
    "first; removing channels one group at a time says more about a budget than removing one channel.",
    "experts": "One column per expert, removed with its router row; the router chooses among the others.",
}
_CHEAPEST = 10


def render_sensitivity(content: Content) -> str:
    """Render the page."""
    title = f"What each part of {short_path(content['model'])} costs to remove"
    kinds = [kind for kind in TITLES if entries_of(content, kind)]
    return page(
        title,
        tag("header", tag("h1", title), tag("div", conditions(content), class_="soft")),
        section("Cheapest to remove", table(HEADINGS, cheapest_rows(content)), note(_CHEAPEST_NOTE)),
        *(section(TITLES[kind], _map(content, kind), note(_NOTES[kind])) for kind in kinds),
        section("How to read this", note(_READING if _is_measured(content) else _READING_ESTIMATES)),
        sections.machine(content),
        tag("footer", "Written by Smelt."),
    )


HEADINGS = ["what", "loss increase", "standard error", "parameters", "increase per million parameters"]
SHORT_HEADINGS = ["what", "loss", "error", "parameters", "per million"]  # for a terminal
_CHEAPEST_NOTE = (
    "By the increase of the loss per parameter that leaves. A negative increase is noise, or a part that harms."
)
_READING = (
    "Each number is the increase of the mean loss if this alone is removed, on the same samples; the darker, the "
    "larger. Costs do not add up: two heads that each cost nothing may do the same work, so that one of them must "
    "stay. The standard error is over samples; differences within it say nothing."
)


_READING_ESTIMATES = (
    "Nothing is removed here. Each number estimates the increase of the mean loss without this after the other weights "
    "have adapted to it: the trace of the Hessian of its weights, divided by twice their number, times their squared "
    "norm (HAP). Estimates add up, so those of a part are the sum of those of its units; they leave out what units do "
    "together. A negative one is noise, or a direction in which the loss falls. The standard error is over random "
    "vectors."
)


def _is_measured(content: Content) -> bool:
    return content.get("measure", "removal") == "removal"


def entries_of(content: Content, kind: str) -> list[Entry]:
    return [removal for removal in content["removals"] if removal["kind"] == kind]


def conditions(content: Content) -> str:
    """Say in one line what was measured."""
    probes = "" if _is_measured(content) else f", Hessian traces with {content['probes']} random vectors each"
    data = short_path(content["data"])
    return f"loss {content['loss']:.4f} on {content['samples']} {content['sample']} of {data}{probes}"


def cheapest_rows(content: Content) -> list[list[str]]:
    """Return the removals that cost least per parameter, for the page and the terminal."""
    measured = [entry for entry in content["removals"] if entry["increase"] is not None and entry["parameters"]]
    measured.sort(key=lambda entry: entry["increase"] / entry["parameters"])
    return [
        [
            describe(entry), _signed(entry["increase"]), "-" if entry["error"] is None else f"{entry['error']:.4f}",
            numbers.count(entry["parameters"]), _signed(1e6 * entry["increase"] / entry["parameters"]),
        ]
        for entry in measured[:_CHEAPEST]
    ]  # fmt: skip


def describe(entry: Entry) -> str:
    """Name what was removed."""
    what = {"layers": "layer", "heads": "head", "channels": "channel group", "experts": "expert"}.get(entry["kind"])
    index = "" if entry["index"] is None else f" {entry['index']} of"
    return f"{what}{index} {entry['name']}" if what else f"all of {entry['name']}"


def _map(content: Content, kind: str) -> Markup:
    """Draw one row per block, or per part of a block, and one shaded cell per removal."""
    entries = entries_of(content, kind)
    worst = max((entry["increase"] for entry in entries if entry["increase"] is not None), default=0.0)
    rows: dict[str, list[Entry]] = {}
    for entry in entries:
        rows.setdefault(str(entry["block"]) if kind in ("layers", "parts") else entry["name"], []).append(entry)
    columns = _columns(kind, rows)
    head = tag(
        "tr", tag("th", "block" if kind in ("layers", "parts") else "part"), *(tag("th", name) for name in columns)
    )
    body = [
        tag(
            "tr",
            tag("td", name),
            *(_cell(entry, column, worst) for entry, column in zip(_padded(row, columns), columns, strict=True)),
        )
        for name, row in rows.items()
    ]
    grid = tag("table", tag("thead", head), tag("tbody", *body), class_="precision")
    return tag("div", grid, class_="scrolled")


def _columns(kind: str, rows: Mapping[str, Sequence[Entry]]) -> list[str]:
    widest = max(rows.values(), key=len)
    if kind == "layers":
        return ["loss increase"]
    if kind == "parts":
        return list(
            dict.fromkeys(entry["name"].rpartition(".")[2].replace("_", " ") for row in rows.values() for entry in row)
        )
    return [str(entry["index"]) for entry in widest]


def _padded(row: Sequence[Entry], columns: Sequence[str]) -> list[Entry | None]:
    """Return the entry of each column; None where a row has none."""
    if row[0]["kind"] == "parts":
        found = {entry["name"].rpartition(".")[2].replace("_", " "): entry for entry in row}
        return [found.get(column) for column in columns]
    return [*row, *[None] * (len(columns) - len(row))]


def _cell(entry: Entry | None, column: str, worst: float) -> Markup:
    if entry is None:
        return tag("td", "", data_label=column)
    if entry["increase"] is None:
        return tag("td", "-", title=f"{describe(entry)}: {entry['why_not']}", data_label=column)
    share = (max(entry["increase"], 0.0) / worst) ** 0.5 if worst > 0 else 0.0
    error = "" if entry["error"] is None else f" ± {entry['error']:.4f}"
    words = f"{describe(entry)}: {_signed(entry['increase'])}{error}, {numbers.count(entry['parameters'])} parameters"
    return tag("td", _signed(entry["increase"]), style=f"--share: {55 * share:.0f}%", title=words, data_label=column)


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")
