"""Read a recipe for a command from a file or from one method's options, and apply overrides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from smelt.cli.output import METHOD, RUN
from smelt.errors import RecipeError
from smelt.strict_yaml import load_yaml

if TYPE_CHECKING:
    from smelt.compression.recipe.recipe import Recipe

RecipeOption = Annotated[
    Path | None, typer.Option("-r", "--recipe", help="Recipe, a YAML file.", rich_help_panel=METHOD)
]
MethodOption = Annotated[
    str | None, typer.Option("--method", help="Apply one method instead of a recipe.", rich_help_panel=METHOD)
]
BitsOption = Annotated[
    float | None, typer.Option("--bits", help="With --method: bits per weight.", rich_help_panel=METHOD)
]
GroupSizeOption = Annotated[
    int | None, typer.Option("--group-size", help="With --method: weights that share a scale.", rich_help_panel=METHOD)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="With --method: any parameter, as name=value; may be repeated.", rich_help_panel=METHOD),
]
SeedOverride = Annotated[
    int | None, typer.Option("--seed", min=0, max=2**32 - 1, help="Override the recipe's seed.", rich_help_panel=RUN)
]


def read_recipe(
    path: Path | None,
    *,
    method: str | None = None,
    settings: dict[str, Any] | None = None,
    data: str | None = None,
    evaluation: str | None = None,
    max_drop: str | None = None,
    guard: str | None = None,
    seed: int | None = None,
) -> Recipe:
    from smelt.compression.recipe.recipe import Guard, Recipe

    if (path is None) == (method is None):
        raise RecipeError("give either a recipe (-r FILE) or one method (--method NAME).")
    if path is None:
        recipe = Recipe.parse({"steps": [{"method": method, **(settings or {})}]})
    elif settings:
        raise RecipeError(f"--{next(iter(settings))} goes with --method; in a recipe, set it in the step.")
    else:
        recipe = Recipe.load(path)
    if data is not None:
        recipe = replace(recipe, data=replace(recipe.data, source=data))
    if evaluation is not None:
        recipe = replace(recipe, evaluate=replace(recipe.evaluate, source=evaluation))
    if max_drop is not None:
        recipe = replace(recipe, evaluate=replace(recipe.evaluate, max_drop=max_drop))
    if guard is not None:
        name, colon, formats = guard.partition(":")
        recipe = replace(recipe, guard=Guard.from_config({name: formats.split(",")} if colon else name))
    return recipe if seed is None else replace(recipe, seed=seed)


def method_settings(bits: float | None, group_size: int | None, others: list[str] | None) -> dict[str, Any]:
    """Collect the method parameters given on the command line; values are parsed as YAML, like in a recipe."""
    settings: dict[str, Any] = {}
    if bits is not None:
        settings["bits"] = int(bits) if bits == int(bits) else bits
    if group_size is not None:
        settings["group_size"] = group_size
    for other in others or []:
        name, equals, value = other.partition("=")
        if not equals or not name:
            raise RecipeError(f"--set takes name=value, not {other!r}.")
        try:
            settings[name] = load_yaml(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise RecipeError(f"the value in --set {other!r} cannot be read.") from error
    return settings
