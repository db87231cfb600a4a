"""`smelt schema`: print the JSON Schema of recipes or training configurations, for editors."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from smelt.compression.recipe.recipe import recipe_schema
from smelt.config import json_schema
from smelt.errors import ConfigError
from smelt.train.trainer.config import TrainConfig

KindArgument = Annotated[str, typer.Argument(metavar="KIND", help="recipe or train.")]


def run(kind: KindArgument) -> None:
    if kind not in ("recipe", "train"):
        raise ConfigError(f"there is no schema {kind!r}; there are recipe and train.")
    print(json.dumps(recipe_schema() if kind == "recipe" else json_schema(TrainConfig), indent=1))
