"""`smelt compare`: several results of `smelt compress` side by side, as a table and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cli.output import JsonOption, console, say, table, unique_names, write_json
from smelt.errors import DataError, SmeltError
from smelt.files import check_writable
from smelt.models.json_file import read_object
from smelt.report.compare import comparison_rows, differences, headings, render_comparison
from smelt.report.page import write_page

MEASUREMENTS = "measurements.json"


def run(
    folders: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Folders written by `smelt compress`.")],
    report: Annotated[Path | None, typer.Option("-o", "--report", help="The page to write.")] = None,
    json_file: JsonOption = None,
) -> None:
    if len(folders) < 2:
        raise SmeltError("a comparison needs two results or more; the report of a single one is in its folder.")
    if report is not None:
        check_writable(report)
    names = unique_names(folders)
    runs = [{**_read(folder), "name": name} for folder, name in zip(folders, names, strict=True)]
    console.print(table("Comparison", headings(runs), comparison_rows(runs)))
    for difference in differences(runs):
        say(f"warning: {difference}")
    if report is not None:
        write_page(render_comparison(runs), report)
        say(f"{report} is written.")
    write_json(json_file, {"headings": headings(runs), "rows": comparison_rows(runs), "warnings": differences(runs)})


def _read(folder: Path) -> dict[str, Any]:
    """Read the record of a run; it comes from a file, so it is rendered once to find what is missing in it."""
    path = folder / MEASUREMENTS
    if not path.is_file():
        raise DataError(f"{folder} has no {MEASUREMENTS}; give folders that `smelt compress` wrote.")
    record = read_object(path)
    try:
        render_comparison([{**record, "name": folder.name}] * 2)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DataError(f"{path} is damaged or of another version; compress the model again.") from error
    return record
