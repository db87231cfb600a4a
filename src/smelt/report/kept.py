"""What was kept: one row a block, heads as cells at their original places, filters and channels as filled bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.report.charts import cells, fraction_bar
from smelt.report.markup import Markup, tag


def kept_map(blocks: Sequence[Mapping[str, Any]]) -> Markup:
    """The heat map of all blocks."""
    headings = [name for name in ("heads", "filters", "channels") if any(block.get(name) for block in blocks)]
    head = tag(
        "div",
        tag("span", "block"),
        *(tag("span", _heading(name, blocks)) for name in headings),
        class_="kept-row kept-head",
    )
    rows = [_row(block, headings) for block in blocks]
    cells_wide = max((block["heads"]["of"] for block in blocks if block.get("heads")), default=0)
    shape = "kept-map" if cells_wide or len(headings) > 1 else "kept-map single"
    return tag("div", head, *rows, class_=shape, style=f"--heads: {20 * cells_wide + 62}px")


def _heading(name: str, blocks: Sequence[Mapping[str, Any]]) -> str:
    unit = next((str(block["unit"]) for block in blocks if block.get("unit")), "head")
    return f"{unit}s" if name == "heads" else name


def _row(block: Mapping[str, Any], headings: Sequence[str]) -> Markup:
    drawn = [tag("div", *_part(name, block), class_=f"part {name}") for name in headings]
    return tag("div", tag("span", block.get("block", ""), class_="block-name"), *drawn, class_="kept-row")


def _part(name: str, block: Mapping[str, Any]) -> list[Markup]:
    part = block.get(name)
    if not part:
        return []
    if name == "heads":
        kept = set(part["kept"])
        return [cells(kept, part["of"], str(block.get("unit", "head"))), _count(len(kept), part["of"])]
    several = part if isinstance(part, list) else [part]
    return [piece for one in several for piece in (_bar(name, one), _count(_number(one), one["of"]))]


def _bar(name: str, part: Mapping[str, Any]) -> Markup:
    kept, of = _number(part), part["of"]
    share = kept / of if of else 0.0
    return fraction_bar(share, f"{kept:,} of {of:,} {name} kept ({100 * share:.0f} %)")


def _number(part: Mapping[str, Any]) -> int:
    kept = part["kept"]
    return kept if isinstance(kept, int) else len(kept)


def _count(kept: int, of: int) -> Markup:
    return tag("span", f"{kept:,} / {of:,}", class_="count")
