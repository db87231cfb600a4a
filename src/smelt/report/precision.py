"""How precisely each layer is held: one row a block, one cell a layer, the paler the nearer to what it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from smelt.report import numbers
from smelt.report.elements import note, section
from smelt.report.markup import Markup, tag
from smelt.report.rows import Run

_EXPLAINED = (
    "Bits of a weight in each layer; the darker, the larger the error of its weights (percent, in parentheses)."
)


def precision(run: Run) -> Markup | None:
    """The map of all quantised layers."""
    blocks = run.get("precision") or []
    if not blocks:
        return None
    names = list(dict.fromkeys(name for block in blocks for name in block["layers"]))
    worst = max(layer["error"] for block in blocks for layer in block["layers"].values()) or 1.0
    head = tag("tr", tag("th", "block"), *(tag("th", name) for name in names))
    rows = [tag("tr", tag("td", block["block"]), *_cells(block["layers"], names, worst)) for block in blocks]
    drawn = tag("table", tag("thead", head), tag("tbody", *rows), class_="precision")
    return section("Precision of the layers", note(_EXPLAINED), tag("div", drawn, class_="scrolled"))


def _cells(layers: Mapping[str, Mapping[str, Any]], names: Sequence[str], worst: float) -> list[Markup]:
    return [_cell(name, layers[name], worst) if name in layers else tag("td", "") for name in names]


def _cell(name: str, layer: Mapping[str, Any], worst: float) -> Markup:
    share = math.sqrt(max(layer["error"], 0.0) / worst)
    error = f"{100 * math.sqrt(max(layer['error'], 0.0)):.1f}"
    words = f"{numbers.plain(layer['bits'])} ({error})"
    return tag("td", words, style=f"--share: {55 * share:.0f}%", title=f"{name}: {layer['format']}", data_label=name)
