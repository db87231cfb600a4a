"""`smelt migrate`: rewrite the old keys of a recipe or training configuration; comments and layout stay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smelt.cli.output import console
from smelt.config import migrate_text
from smelt.errors import ConfigError
from smelt.files import write_atomically
from smelt.strict_yaml import load_yaml, read_yaml

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A recipe or a training configuration, in YAML.")]
OutOption = Annotated[Path | None, typer.Option("-o", "--out", help="Write here instead of replacing FILE.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Write nothing; exit with 3 if FILE uses old names.")]


def run(file: FileArgument, out: OutOption = None, check: CheckOption = False) -> None:
    from smelt.compression.recipe.recipe import Recipe
    from smelt.train.trainer.config import TrainConfig

    content = read_yaml(file, "recipe or configuration")
    if not isinstance(content, dict) or not {"steps", "model"} & content.keys():
        raise ConfigError(f"{file} is neither a recipe (with `steps`) nor a training configuration (with a `model`).")
    text = file.read_text(encoding="utf-8")
    if isinstance(content.get("steps"), list):
        migrated = migrate_text(text, Recipe)
        try:  # what is written must be valid, so that no other mistake hides behind the old names
            Recipe.parse(load_yaml(migrated))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
    else:
        migrated = migrate_text(text, TrainConfig)
    changes = [(old, new) for old, new in zip(text.splitlines(), migrated.splitlines(), strict=True) if old != new]
    for old, new in changes:
        console.print(f"- {old.strip()}\n+ {new.strip()}", soft_wrap=True)
    if check:
        raise typer.Exit(3 if changes else 0)
    target = out or file
    if changes or out is not None:
        write_atomically(target, lambda temporary: temporary.write_text(migrated, encoding="utf-8"))
    console.print(f"{target}: {len(changes)} lines changed", soft_wrap=True)
