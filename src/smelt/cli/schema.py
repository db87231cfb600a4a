"""`smelt schema`: print the JSON Schema of recipes, or of training or server configurations, for editors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from smelt.config import json_schema, suggest
from smelt.errors import ConfigError

KindArgument = Annotated[str, typer.Argument(metavar="KIND", help="recipe, train or serve.")]


def run(kind: KindArgument) -> None:
    if kind not in SCHEMAS:
        raise ConfigError(f"there is no schema {kind!r}{suggest(kind, list(SCHEMAS), 'there are')}")
    print(json.dumps(SCHEMAS[kind](), indent=1))


def _recipe() -> dict[str, Any]:
    from smelt.compression.recipe.recipe import recipe_schema

    return recipe_schema()


def _train() -> dict[str, Any]:
    from smelt.train.trainer.config import TrainConfig

    return json_schema(TrainConfig)


def _serve() -> dict[str, Any]:
    from smelt.serve.server.settings import ServeConfig

    return json_schema(ServeConfig)


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {"recipe": _recipe, "train": _train, "serve": _serve}
