"""`smelt schema`: print the JSON Schema of recipes, or of training or server configurations, for editors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from smelt.compression.recipe.recipe import recipe_schema
from smelt.config import json_schema, suggest
from smelt.errors import ConfigError
from smelt.serve.server.settings import ServeConfig
from smelt.train.trainer.config import TrainConfig

SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "recipe": recipe_schema,
    "train": partial(json_schema, TrainConfig),
    "serve": partial(json_schema, ServeConfig),
}
KindArgument = Annotated[str, typer.Argument(metavar="KIND", help="recipe, train or serve.")]


def run(kind: KindArgument) -> None:
    if kind not in SCHEMAS:
        raise ConfigError(f"there is no schema {kind!r}{suggest(kind, list(SCHEMAS), 'there are')}")
    print(json.dumps(SCHEMAS[kind](), indent=1))
