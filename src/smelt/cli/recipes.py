"""Read a recipe for a command from a file or from one method's options, and apply overrides."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from smelt.cli.output import DATA, METHOD, RUN
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
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="MEASURE=SHARE",
        help="Keep at most this share: parameters=0.8, macs=0.5, bytes=0.3 (read per decoded token) or latency=0.6.",
        rich_help_panel=METHOD,
    ),
]
SamplesOption = Annotated[
    int | None, typer.Option("--samples", min=1, help="Calibration sequences, or rows.", rich_help_panel=DATA)
]
LengthOption = Annotated[
    int | None, typer.Option("--length", min=1, help="Tokens per calibration sequence.", rich_help_panel=DATA)
]
SeedOverride = Annotated[
    int | None, typer.Option("--seed", min=0, max=2**32 - 1, help="Override the recipe's seed.", rich_help_panel=RUN)
]


def read_recipe(
    path: Path | None,
    *,
    method: str | None = None,
    settings: dict[str, Any] | None = None,
    budget: str | None = None,
    samples: int | None = None,
    length: int | None = None,
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
        recipe = Recipe.parse({"steps": [{"method": method, **(settings or {}), **_budget_of(method, budget)}]})
    elif settings:
        raise RecipeError(f"--{next(iter(settings))} goes with --method; in a recipe, set it in the step.")
    else:
        recipe = Recipe.load(path)
        if budget is not None:
            recipe = _with_budget(recipe, budget)
    if samples is not None:
        recipe = replace(recipe, data=replace(recipe.data, samples=samples))
    if length is not None:
        recipe = replace(recipe, data=replace(recipe.data, seq_len=length))
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


def _budget_of(method: str | None, budget: str | None) -> dict[str, str]:
    """Return the budget of a method as its parameter; refuse it for one that removes nothing."""
    from smelt.compression.methods import METHODS

    if budget is None:
        return {}
    if "budget" not in {field.name for field in fields(METHODS.named(method))}:  # type: ignore[arg-type]
        raise RecipeError(f"{method} removes nothing, so it takes no --budget; its size is set by --bits or --set.")
    return {"budget": budget}


def _with_budget(recipe: Recipe, budget: str) -> Recipe:
    """Replace the budget of the one step that has one."""
    from smelt.compression.budget import Budget

    steps = [step for step in recipe.steps if hasattr(step, "budget")]
    if len(steps) != 1:
        number = "no step" if not steps else f"{len(steps)} steps"
        raise RecipeError(f"--budget replaces the budget of one step, and {number} of this recipe has one; edit it.")
    changed = replace(steps[0], budget=Budget.from_config(budget))  # type: ignore[type-var]
    return replace(recipe, steps=tuple(changed if step is steps[0] else step for step in recipe.steps))


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
