"""Shared by all commands: common options, tables on stdout, messages on stderr, results as JSON."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from smelt.device import resolve_device
from smelt.errors import SmeltError
from smelt.files import check_writable, json_text, write_atomically


def _json_path(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before any work starts."""
    if path is not None:
        check_writable(path)
        if path.is_dir():
            raise SmeltError(f"{path} is a folder; give --json a file to write to.")
    return path


def check_device(name: str) -> str:
    """Refuse a name that is not auto, cpu, cuda or cuda:N; replace auto by cuda if there is a GPU, else by cpu."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise SmeltError(f"there is no device {name!r:.80}; use auto, cpu, cuda, or cuda:1 for the second one.")
    return resolve_device(name)


# Panels of options in the help of several commands.
METHOD, DATA, SPEED, RUN = "Method", "Data and quality", "Speed", "Run and output"

JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json", callback=_json_path, help="Also write the result to this file as JSON.", rich_help_panel=RUN
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Random seed.", rich_help_panel=RUN)]
DEVICE_HELP = "Where to run: auto (a GPU if there is one), cpu or cuda."
DeviceOption = Annotated[str, typer.Option("--device", callback=check_device, help=DEVICE_HELP, rich_help_panel=RUN)]
WorkloadOption = Annotated[
    str,
    typer.Option(
        help="Of the engine: chat (512 tokens in, 256 out), long (16384, 512), batch (256, 256) or a trace.",
        rich_help_panel=SPEED,
    ),
]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A bundled name, a folder, a .gguf file or a hub id.")
]


class _Console(Console):
    """A console that leaves a closed pipe to `main`, where it is no error; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


# Names and texts come from outside, so what looks like markup in them must be printed literally.
console = _Console(markup=False, emoji=False, highlight=False)


def say(sentence: str) -> None:
    """Print a progress message to stderr, so that stdout holds results only."""
    print(f"  {sentence}", file=sys.stderr, flush=True)


def table(title: str, headings: list[str], rows: list[list[str]]) -> Table:
    """Build a plain table; numeric columns other than the first are right-aligned."""
    result = Table(title=title, title_justify="left", header_style="bold")
    for position, heading in enumerate(headings):
        numeric = position > 0 and all(row[position][:1].isdigit() or row[position] in ("", "-") for row in rows)
        result.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def unique_names(folders: list[Path]) -> list[str]:
    """Return the folders' names, or their paths where names repeat."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def write_json(path: Path | None, content: Any) -> None:
    if path is not None:
        write_atomically(path, lambda temporary: temporary.write_text(json_text(content)))
