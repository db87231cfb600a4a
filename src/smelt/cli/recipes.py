"""Reading a recipe for a command, with what the command line overrides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from smelt.recipes.recipe import Recipe

RecipeOption = Annotated[Path, typer.Option("-r", "--recipe", help="The recipe, a YAML file.")]
SeedOverride = Annotated[int | None, typer.Option("--seed", min=0, max=2**32 - 1, help="Replaces the recipe's seed.")]


def read_recipe(
    path: Path, *, data: str | None = None, evaluation: str | None = None, seed: int | None = None
) -> Recipe:
    recipe = Recipe.load(path)
    if data is not None:
        recipe = replace(recipe, data=replace(recipe.data, source=data))
    if evaluation is not None:
        recipe = replace(recipe, evaluate=replace(recipe.evaluate, source=evaluation))
    return recipe if seed is None else replace(recipe, seed=seed)
