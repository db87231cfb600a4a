"""The page of `smelt accumulator-bits`: bits against length, each layer a point, and a table of all GEMMs.

Its content is a plain dict: `model`, `data`, `product_bits`, `chunk_size`, `batch_size`, `sample` (what one sample is),
`curve` (length, bits, bits in chunks) and `layers` (name, kind, gemms as name, length, nonzero_ratio, bits,
chunked_bits).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from smelt.report import numbers
from smelt.report.markup import Markup, join, note, section, table, tag
from smelt.report.page import page
from smelt.report.plots import Labeled, Scale, Series, legend, lines

GEMMS = {"forward": "forward", "backward": "backward, of the inputs", "gradient": "gradient, of the weights"}

Content = Mapping[str, Any]


def render_accumulator_bits(content: Content) -> str:
    """Render the page."""
    title = f"Accumulator bits of {content['model']}"
    return page(
        title,
        tag("header", tag("h1", title), tag("div", conditions(content), class_="soft")),
        section("Bits against accumulation length", _graphs(content), note(_CURVES)),
        section("Layers", table(headings(content), layer_rows(content)), note(_TABLE)),
        tag("footer", "Written by Smelt."),
    )


_CURVES = (
    "The curves are the fewest mantissa bits with which a sum of that length keeps its variance (v(n) < 50, Sakr et "
    "al., 2019) if no product is zero; a layer below its curve has zeros. Hover over a point for its name."
)
_TABLE = (
    "Mantissa bits without the hidden one. The formula assumes products of zero mean and rounding to nearest; a "
    "truncating adder needs more. Layers that differ in a number of their name only are shown as one if they agree."
)


def conditions(content: Content) -> str:
    """Say in one line what the prediction is for."""
    zeros = f"zeros measured on {content['data']}" if content["data"] else "no product is zero"
    return (
        f"batches of {content['batch_size']} {content['sample']}, products with {content['product_bits']} mantissa "
        f"bits, {zeros}"
    )


def headings(content: Content) -> list[str]:
    return ["layer", "GEMM", "length", "nonzero", "bits", f"in chunks of {content['chunk_size']}"]


def layer_rows(content: Content) -> list[list[str]]:
    """Build one row per GEMM of each group of equal layers."""
    groups: dict[tuple[Any, ...], list[Content]] = {}
    for layer in content["layers"]:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", layer["name"])
        results = tuple((gemm["name"], gemm["length"], gemm["bits"], gemm["chunked_bits"]) for gemm in layer["gemms"])
        groups.setdefault((pattern, results), []).append(layer)
    rows = []
    for (pattern, _), layers in groups.items():
        name = layers[0]["name"] if len(layers) == 1 else f"{pattern} ({len(layers)})"
        for index, gemm in enumerate(layers[0]["gemms"]):
            ratios = [layer["gemms"][index]["nonzero_ratio"] for layer in layers]
            measured = "-" if None in ratios else f"{100 * sum(ratios) / len(ratios):.0f} %"
            length, bits, chunked = (str(gemm[key]) for key in ("length", "bits", "chunked_bits"))
            rows.append([name if index == 0 else "", gemm["name"], length, measured, bits, chunked])
    return rows


def widest_sentence(content: Content) -> str:
    """Name the GEMM that needs the most bits."""
    every = [(gemm, layer) for layer in content["layers"] for gemm in layer["gemms"]]
    gemm, layer = max(every, key=lambda pair: (pair[0]["bits"], pair[0]["chunked_bits"], pair[0]["length"]))
    return (
        f"the widest accumulator is that of the {gemm['name']} GEMM of {layer['name']}: {gemm['bits']} mantissa bits "
        f"for {numbers.count(gemm['length'])} products, {gemm['chunked_bits']} in chunks of {content['chunk_size']}"
    )


def _graphs(content: Content) -> Markup:
    names = ["plain accumulation", f"chunks of {content['chunk_size']}"]
    curve = content["curve"]
    x = Scale("products in the sum", curve[0][0], curve[-1][0], logarithmic=True)
    most = max(bits for _, bits, _ in curve)
    y = Scale("mantissa bits", min(content["product_bits"] - 1, 4), most + 1)
    series = [Series(name, _steps([(row[0], row[1 + index]) for row in curve])) for index, name in enumerate(names)]
    graphs = []
    for gemm_name, title in GEMMS.items():
        gemms = [(layer["name"], g) for layer in content["layers"] for g in layer["gemms"] if g["name"] == gemm_name]
        dots = [
            [
                Labeled(f"{name}: {gemm['length']} products, {gemm[key]} bits", gemm["length"], gemm[key])
                for name, gemm in gemms
            ]
            for key in ("bits", "chunked_bits")
        ]
        graphs.append(lines(title, series, x, y, dots))
    *narrow, widest = graphs  # the gradient GEMM has the longest sums
    return join(legend(names), tag("div", *narrow, class_="graphs"), widest)


def _steps(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Add the corners of a step function."""
    corners = [points[0]]
    for x, y in points[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    return corners
