"""HTML from nested calls: every text is escaped on its way in, so that no value of a run can become markup."""

from __future__ import annotations

from html import escape

_VOID = {"meta", "br", "rect", "line", "circle"}  # written without children; in SVG as <rect ... />


class Markup(str):
    """HTML that is finished: it goes into a page as it is. Only `tag` and `join` make it."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """One element. Children that are None are left out; `class_` is class, and `text_anchor` is text-anchor."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Markup(f"<{name}{written} />")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Children one after the other, plain text escaped."""
    return Markup("".join(child if isinstance(child, Markup) else escape(_text(child)) for child in children))


def _text(child: object) -> str:
    return "" if child is None else str(child)
