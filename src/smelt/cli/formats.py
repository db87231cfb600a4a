"""`smelt formats`: list the number formats with their bits, grids, scales and error on normal values."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from smelt.cli.output import JsonOption, SeedOption, console, table, write_json

ROWS, COLUMNS = 48, 4096  # shape of the normal sample; bits are counted for a square matrix with this many columns
SHOWN = ("", "-asym", "-wide", "-sym")  # suffixes of the 4-bit integers shown; the other widths have their own table
EXAMPLE = "int4-asym/128@float16"


def run(json_file: JsonOption = None, seed: SeedOption = 0) -> None:
    import torch

    from smelt.numerics import FORMATS
    from smelt.numerics.describe import describe_format

    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
    descriptions = {name: describe_format(name, x) for name in FORMATS}
    _show_formats(descriptions)
    _show_widths(descriptions)
    _show_notes(describe_format(EXAMPLE, x))
    write_json(json_file, list(descriptions.values()))


def _show_formats(descriptions: dict[str, dict[str, Any]]) -> None:
    shown = [
        row
        for name, row in descriptions.items()
        if not (affixes := _split_integer_name(name)) or (row["bits"] == 4 and affixes[1] in SHOWN)
    ]
    cells = [
        [
            row["name"], str(row["bits"]), f"{row['bits_per_value']:.2f}", f"{row['signal_to_noise']:.1f}",
            row["grid"], row["scale"], str(row["group"]),
        ]
        for row in shown
    ]  # fmt: skip
    result = table("Number formats", ["format", "bits", "stored", "dB", "grid", "scale", "group"], cells)
    for position, (row, following) in enumerate(pairwise(shown)):
        result.rows[position].end_section = _section(row["name"]) != _section(following["name"])
    console.print(result)


def _show_widths(descriptions: dict[str, dict[str, Any]]) -> None:
    """Print the integer formats, whose rows would differ only in their bits."""
    families = list(dict.fromkeys(affixes for name in descriptions if (affixes := _split_integer_name(name))))
    widths = sorted({row["bits"] for name, row in descriptions.items() if _split_integer_name(name)})
    rows = [[descriptions.get(f"{first}{width}{last}") for width in widths] for first, last in families]
    cells = [
        [f"{first}N{last}", *("-" if cell is None else f"{cell['signal_to_noise']:.1f}" for cell in row)]
        for (first, last), row in zip(families, rows, strict=True)
    ]
    console.print(table("Integers of N bits: dB", ["format", *map(str, widths)], cells))


def _split_integer_name(name: str) -> tuple[str, str] | None:
    """Split an integer format's name around its bit width; None for other formats."""
    parts = re.fullmatch(r"([du]?int)\d(.*)", name)
    return (parts[1], parts[2]) if parts else None


def _section(name: str) -> str | None:
    """Group the rows: integers, plain floats, OCP block formats, others."""
    start = re.match(r"[du]?(int|fp|mx)", name)
    return start[1] if start else None


def _show_notes(example: dict[str, Any]) -> None:
    from smelt.numerics.scales import FLOAT_SCALES, POWER_OF_TWO_SCALES

    console.print(
        f"stored: bits per value including scales, for {COLUMNS} columns. dB: signal-to-noise ratio on "
        f"{ROWS} x {COLUMNS} normal values, measured now. group: values that share a scale.\n"
        "zero: one byte per scale; a float16 in intN-float-zero, which need not be an integer (hqq), and a float32 in "
        "intN-float32-zero. intN-wide uses the full range of codes. amxfp4: one scale per sign. "
        "nvfp4: also one float32 per tensor.\n"
        "A name may be followed by `/` and the group (a number, `row`, `tensor`), then `@` and the scale's type: "
        f"{example['name']} takes {example['bits_per_value']:.2f} bits and has "
        f"{example['signal_to_noise']:.1f} dB.\n"
        f"Scale types: {', '.join(FLOAT_SCALES)}; {', '.join(POWER_OF_TWO_SCALES)} are powers of two, "
        "not for integers and ternary; "
        "nvfp4 has e4m3 only."
    )
