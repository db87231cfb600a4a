"""`smelt sign`: sign every file of a model folder with a private key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smelt.cli.output import console
from smelt.compression.passport.signing import SIGNATURE, key_hint, load_private_key
from smelt.progress import progress_bars

KeyOption = Annotated[Path, typer.Option("--key", help="Private key: PEM, elliptic curve P-256, P-384 or P-521.")]


def run(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a model.")],
    key: KeyOption,
) -> None:
    from smelt.compression.passport.issue import sign_folder

    loaded = load_private_key(key)
    with progress_bars() as progress:
        files = sign_folder(folder, loaded, progress)
    hint = key_hint(loaded.public_key())
    console.print(f"signed {files} files: {folder / SIGNATURE}    key {hint[:12]}", soft_wrap=True)
