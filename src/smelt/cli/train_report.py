"""`smelt train-report`: one or several training runs as a page with plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cli.output import JsonOption, SeedOption, console, say, table, unique_names, write_json
from smelt.errors import DataError, SmeltError
from smelt.files import check_writable
from smelt.report.page import write_page
from smelt.report.training import fact_rows, render_training, summary


def run(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders written by `python -m smelt.train`.")],
    report: Annotated[
        Path | None,
        typer.Option("-o", "--report", help="The page to write (default: RUN/report.html of a single run)."),
    ] = None,
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    if report is None:
        if len(runs) > 1:
            raise SmeltError("several runs have no common folder; give -o with the page to write.")
        report = runs[0] / "report.html"
    check_writable(report)
    names = unique_names(runs)
    contents = [{**_read(folder), "name": name} for folder, name in zip(runs, names, strict=True)]
    console.print(table("Training", ["", *names], fact_rows(contents)))
    write_page(render_training(contents), report)
    write_json(json_file, {content["name"]: summary(content) for content in contents})
    say(f"{report} is written.")


def _read(path: Path) -> dict[str, Any]:
    from smelt.train.trainer.run_folder import RunFolder

    folder = RunFolder(path)
    metadata, log = folder.read_metadata(), folder.read_log()
    if not log:
        raise DataError(f"{path} has no step in its log yet; try again when the run has done some.")
    return {"metadata": metadata, "log": log}
