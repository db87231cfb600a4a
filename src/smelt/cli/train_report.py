"""`smelt train-report`: training runs as a page with plots, one or several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cli.output import JsonOption, SeedOption, console, say, table, write_json
from smelt.errors import DataError, SmeltError
from smelt.files import check_writable
from smelt.report.page import write_page
from smelt.report.training import fact_rows, render_training, summary
from smelt.train.trainer.run_folder import RunFolder


def run(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that `python -m smelt.train` wrote.")],
    report: Annotated[
        Path | None, typer.Option("-o", "--report", help="The page; by default RUN/report.html of a single run.")
    ] = None,
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    if report is None:
        if len(runs) > 1:
            raise SmeltError("several runs have no folder of their own; say with -o where the page is written.")
        report = runs[0] / "report.html"
    check_writable(report)
    found = [_read(folder) for folder in runs]
    names = _names(runs)
    for each, name in zip(found, names, strict=True):
        each["name"] = name
    console.print(table("Training", ["", *names], fact_rows(found)))
    write_page(render_training(found), report)
    write_json(json_file, {each["name"]: summary(each) for each in found})
    say(f"{report} is written.")


def _read(path: Path) -> dict[str, Any]:
    folder = RunFolder(path)
    facts, lines = folder.read_metadata(), folder.read_log()
    if not lines:
        raise DataError(f"{path} has no step in its log yet; come back when the run has done some.")
    return {"facts": facts, "lines": lines}


def _names(runs: list[Path]) -> list[str]:
    """The folders' own names, or whole paths where those are the same."""
    short = [folder.resolve().name for folder in runs]
    return short if len(set(short)) == len(short) else [str(folder) for folder in runs]
