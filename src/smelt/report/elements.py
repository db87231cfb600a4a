"""The pieces that all sections are built of."""

from __future__ import annotations

from collections.abc import Iterable

from smelt.report.markup import Markup, tag


def section(heading: str, *content: object) -> Markup:
    return tag("section", tag("h2", heading), *content)


def note(text: str) -> Markup:
    return tag("p", text, class_="soft")


def warning(text: str, lead: str = "") -> Markup:
    return tag("div", tag("b", f"{lead} ") if lead else None, text, class_="warning", role="note")


def table(headings: Iterable[str], rows: Iterable[Iterable[object]], foot: Iterable[object] = ()) -> Markup:
    """A table, its first column to the left and all others to the right."""
    names, last = list(headings), list(foot)

    def line(cells: Iterable[object]) -> Markup:
        # On a phone a row becomes a small card, where each value carries its heading.
        return tag("tr", *(tag("td", cell, data_label=name) for name, cell in zip(names, cells, strict=True)))

    head = tag("thead", tag("tr", *(tag("th", name) for name in names)))
    body = tag("tbody", *(line(row) for row in rows))
    return tag("table", head, body, tag("tfoot", line(last)) if last else None)
