"""HTML from nested calls, with every text escaped, and the elements that all pages are built of."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = {"meta", "br", "rect", "line", "circle"}  # written as <rect ... /> when they have no children


class Markup(str):
    """Finished HTML that is inserted unescaped. Only `tag` and `join` create it."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Build one element. None children are left out; `class_` is class, and `text_anchor` is text-anchor."""
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Markup(f"<{name}{attribute_text} />")
    return Markup(f"<{name}{attribute_text}>{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Concatenate children, escaping plain text."""
    return Markup("".join(child if isinstance(child, Markup) else escape(_text(child)) for child in children))


def _text(child: object) -> str:
    return "" if child is None else str(child)


def section(heading: str, *content: object) -> Markup:
    return tag("section", tag("h2", heading), *content)


def details(summary: str, *content: object) -> Markup:
    """Fold content until the reader opens it."""
    return tag("details", tag("summary", summary), *content)


def note(text: str) -> Markup:
    return tag("p", text, class_="soft")


def warning(text: str, lead: str = "") -> Markup:
    return tag("div", tag("b", f"{lead} ") if lead else None, text, class_="warning", role="note")


def table(headings: Iterable[str], rows: Iterable[Iterable[object]], foot: Iterable[object] = ()) -> Markup:
    """Build a table with the first column left-aligned and the others right-aligned."""
    names, last = list(headings), list(foot)

    def line(cells: Iterable[object]) -> Markup:
        # On a phone a row becomes a card in which each value carries its heading.
        return tag("tr", *(tag("td", cell, data_label=name) for name, cell in zip(names, cells, strict=True)))

    head = tag("thead", tag("tr", *(tag("th", name) for name in names)))
    body = tag("tbody", *(line(row) for row in rows))
    return tag("table", head, body, tag("tfoot", line(last)) if last else None)
