"""`smelt plan`: estimate memory, time and disk of a recipe before any work; refuse what cannot fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smelt.cli.output import JsonOption, ModelArgument, console, table, write_json
from smelt.cli.recipes import (
    BitsOption,
    GroupSizeOption,
    MethodOption,
    RecipeOption,
    SeedOverride,
    SetOption,
    read_recipe,
    settings_of,
)
from smelt.compression.recipe.plan import CompressionPlan
from smelt.compression.recipe.plan import plan as make_plan
from smelt.report.numbers import count, seconds, size

OutOption = Annotated[Path, typer.Option("-o", "--out", help="Where the result would be written.")]


def run(
    model: ModelArgument,
    recipe: RecipeOption = None,
    method: MethodOption = None,
    bits: BitsOption = None,
    group_size: GroupSizeOption = None,
    parameters: SetOption = None,
    out: OutOption = Path("smelted"),
    data: str | None = None,
    json_file: JsonOption = None,
    seed: SeedOverride = None,
) -> None:
    made = make_plan(
        model,
        read_recipe(recipe, method=method, settings=settings_of(bits, group_size, parameters), data=data, seed=seed),
        out,
    )
    show(made)
    write_json(json_file, made.to_json())
    made.check()


def show(made: CompressionPlan) -> None:
    rows = [
        ["parameters", count(made.parameters)],
        ["in blocks, before", count(made.block_parameters)],
        ["in blocks, after (at most)", count(made.block_parameters_after)],
        ["weights", size(made.bytes)],
        ["peak memory (estimate)", f"{size(made.peak_memory)} of {size(made.available_memory)} available"],
        ["disk (estimate)", f"{size(made.disk)} of {size(made.free_disk)} free"],
        ["time (estimate)", seconds(made.seconds)],
    ]
    console.print(table(f"Plan for {made.model}", ["", "estimate"], rows))
    steps = [
        [step.method, ", ".join(f"{k} {v:g}" for k, v in step.budget.items()), seconds(step.seconds), size(step.memory)]
        for step in made.steps
    ]
    console.print(table("Steps", ["method", "budget", "time", "memory beyond weights"], steps))
