"""Per-layer sections: the units that were kept, the precision of each layer, undercalibrated experts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from smelt.report import numbers
from smelt.report.charts import cells, fraction_bar
from smelt.report.markup import Markup, note, section, table, tag
from smelt.report.rows import Run

# The headings of channels; "filters" is what reports of format 1 call the FFN channels.
_CHANNELS = {"experts": "experts", "ffn_channels": "FFN channels", "filters": "FFN channels", "channels": "channels"}


def kept_map(blocks: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the heat map of kept units: heads as cells, channels as filled bars, one row per block."""
    headings = [name for name in ("heads", *_CHANNELS) if any(block.get(name) for block in blocks)]
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
    return f"{unit}s" if name == "heads" else _CHANNELS[name]


def _row(block: Mapping[str, Any], headings: Sequence[str]) -> Markup:
    parts = [tag("div", *_part(name, block), class_=f"part {name}") for name in headings]
    return tag("div", tag("span", block.get("block", ""), class_="block-name"), *parts, class_="kept-row")


def _part(name: str, block: Mapping[str, Any]) -> list[Markup]:
    part = block.get(name)
    if not part:
        return []
    if name == "heads":
        kept = set(part["kept"])
        return [cells(kept, part["of"], str(block.get("unit", "head"))), _count(len(kept), part["of"])]
    parts = part if isinstance(part, list) else [part]
    return [markup for each in parts for markup in (_bar(name, each), _count(_num_kept(each), each["of"]))]


def _bar(name: str, part: Mapping[str, Any]) -> Markup:
    kept, of = _num_kept(part), part["of"]
    share = kept / of if of else 0.0
    if kept > of:  # widened
        return fraction_bar(1.0, f"{kept:,} {_CHANNELS[name]}, {of:,} before ({100 * share:.0f} %)")
    return fraction_bar(share, f"{kept:,} of {of:,} {_CHANNELS[name]} kept ({100 * share:.0f} %)")


def _num_kept(part: Mapping[str, Any]) -> int:
    kept = part["kept"]
    return kept if isinstance(kept, int) else len(kept)


def _count(kept: int, of: int) -> Markup:
    return tag("span", f"{kept:,} / {of:,}", class_="count")


def name_in_block(path: str) -> str:
    """Return the name of a layer without its block: `model.layers.3.mlp.up_proj` becomes `mlp.up_proj`."""
    return re.sub(r"^.*?\.\d+\.", "", path)


_PRECISION_NOTE = "Bits per weight in each layer; the darker, the larger the weight error (percent, in parentheses)."


def precision(run: Run) -> Markup | None:
    """Draw the precision of all quantized layers: one row per block, one cell per layer."""
    blocks = run.get("precision") or []
    if not blocks:
        return None
    names = list(dict.fromkeys(name for block in blocks for name in block["layers"]))
    worst = max(layer["error"] for block in blocks for layer in block["layers"].values()) or 1.0
    head = tag("tr", tag("th", "block"), *(tag("th", name) for name in names))
    rows = [tag("tr", tag("td", block["block"]), *_precision_cells(block["layers"], names, worst)) for block in blocks]
    grid = tag("table", tag("thead", head), tag("tbody", *rows), class_="precision")
    return section("Precision per layer", note(_PRECISION_NOTE), tag("div", grid, class_="scrolled"))


def _precision_cells(layers: Mapping[str, Mapping[str, Any]], names: Sequence[str], worst: float) -> list[Markup]:
    return [_precision_cell(name, layers[name], worst) if name in layers else tag("td", "") for name in names]


def _precision_cell(name: str, layer: Mapping[str, Any], worst: float) -> Markup:
    share = math.sqrt(max(layer["error"], 0.0) / worst)
    error = f"{100 * math.sqrt(max(layer['error'], 0.0)):.1f}"
    words = f"{numbers.plain(layer['bits'])} ({error})"
    return tag("td", words, style=f"--share: {55 * share:.0f}%", title=f"{name}: {layer['format']}", data_label=name)


MAX_LISTED = 8  # in the terminal
_EXPERTS_NOTE = (
    "Fewer calibration tokens reached these experts than their widest layer has input channels, so their Hessian is "
    "rank-deficient; an expert that no token reached was rounded to nearest. More calibration data helps."
)


def undercalibrated_experts(run: Run) -> Markup | None:
    """List the experts that saw fewer calibration tokens than they have input channels."""
    experts = run.get("few_tokens") or []
    if not experts:
        return None
    rows = [(expert["expert"], _tokens(expert), numbers.plain(expert["inputs"])) for expert in experts]
    return section("Undercalibrated experts", note(_EXPERTS_NOTE), table(("expert", "tokens", "inputs"), rows))


def undercalibrated_sentence(run: Run) -> str:
    """Name the first of them in one sentence; empty if there are none."""
    experts = run.get("few_tokens") or []
    if not experts:
        return ""
    names = [f"{expert['expert']} ({_tokens(expert)})" for expert in experts[:MAX_LISTED]]
    more = f" and {len(experts) - MAX_LISTED} more, listed in the report" if len(experts) > MAX_LISTED else ""
    return f"undercalibrated experts (fewer tokens than input channels): {', '.join(names)}{more}"


def _tokens(expert: Mapping[str, Any]) -> str:
    return numbers.plain(expert["tokens"]) if expert["tokens"] else "never reached"
