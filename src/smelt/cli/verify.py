"""`smelt verify`: check an artifact against its passport; exit code 3 if anything differs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smelt.cli.output import JsonOption, console, say, write_json
from smelt.compression.passport.document import Passport, passport_lines, read_passport
from smelt.compression.passport.signing import load_public_key
from smelt.errors import ConfigError
from smelt.progress import progress_bars
from smelt.report.numbers import size

if TYPE_CHECKING:
    from smelt.compression.passport.check import FolderCheck
    from smelt.compression.passport.reproduce import Reproduction

DIFFERS = 3

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of an artifact.")]
KeyOption = Annotated[
    Path | None, typer.Option("--public-key", help="Require a valid signature by this key (PEM, elliptic curve).")
]
ReproduceOption = Annotated[
    bool, typer.Option("--reproduce", help="Repeat the run, with its recorded choices, and compare the bytes.")
]
SourceOption = Annotated[
    str | None, typer.Option("--source", metavar="MODEL", help="With --reproduce: where the source model is now.")
]
DataOption = Annotated[str | None, typer.Option("--data", help="With --reproduce: where the calibration data is now.")]
EvalOption = Annotated[
    str | None, typer.Option("--eval-data", help="With --reproduce: where the evaluation data is now.")
]
WorkOption = Annotated[
    Path | None, typer.Option("--work-folder", help="With --reproduce: repeat the run in this folder; it stays empty.")
]


def run(
    folder: FolderArgument,
    public_key: KeyOption = None,
    repeat: ReproduceOption = False,
    source: SourceOption = None,
    data: DataOption = None,
    eval_data: EvalOption = None,
    work_folder: WorkOption = None,
    json_file: JsonOption = None,
) -> None:
    from smelt.compression.passport.check import check_folder
    from smelt.compression.passport.reproduce import Inputs, reproduce

    inputs = Inputs(source, data, eval_data)
    if not repeat and inputs != Inputs():
        raise ConfigError("--source, --data and --eval-data go with --reproduce.")
    key = load_public_key(public_key) if public_key is not None else None
    passport = read_passport(folder)
    with progress_bars() as progress:
        check = check_folder(folder, passport, key, progress)
        _show(folder, passport, check)
        repeated = None
        if repeat and not check.problems:
            repeated = reproduce(passport, inputs, progress=progress, say=say, work_folder=work_folder)
    failures = [*check.problems, *_show_reproduction(repeated)]
    write_json(json_file, _content(folder, passport, check, repeated, failures))
    for failure in failures:
        console.print(f"failed: {failure}", soft_wrap=True)
    if failures:
        raise typer.Exit(DIFFERS)


def _show(folder: Path, passport: Passport, check: FolderCheck) -> None:
    for line in passport_lines(passport):
        console.print(line, soft_wrap=True)
    if check.changes.none:
        console.print(f"{folder}: all {check.files} files match ({size(check.total_bytes)})", soft_wrap=True)
    signature = {
        "valid": "signature: valid, by the given key",
        "none": "signature: none; anybody could have written this passport",
        "not checked": "signature: not checked; give --public-key",
    }
    if check.signature in signature:
        console.print(signature[check.signature])
    if check.loaded in ("same logits", "finite outputs"):
        console.print(f"loaded in a clean process: {check.loaded}")
    for note in check.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _show_reproduction(repeated: Reproduction | None) -> list[str]:
    """Print the result of the repeated run; return what differs."""
    if repeated is None:
        return []
    if repeated.changes.none:
        console.print(f"reproduced: {repeated.files} files, byte for byte")
        return []
    reasons = "; ".join(repeated.reasons) or "versions and machine are those of the passport"
    return [f"the repeated run wrote other bytes ({repeated.changes.describe()}); {reasons}"]


def _content(
    folder: Path, passport: Passport, check: FolderCheck, repeated: Reproduction | None, failures: list[str]
) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "passed": not failures,
        "fingerprint": passport.fingerprint,
        "check": asdict(check),
        "reproduction": None if repeated is None else asdict(repeated),
        "failures": failures,
    }
