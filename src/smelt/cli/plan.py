"""`smelt plan`: estimate memory, time and disk of a recipe before any work; refuse what cannot fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smelt.cli.output import DATA, RUN, DeviceOption, JsonOption, ModelArgument, console, table, write_json
from smelt.cli.recipes import (
    BitsOption,
    BudgetOption,
    GroupSizeOption,
    LengthOption,
    MethodOption,
    RecipeOption,
    SamplesOption,
    SeedOverride,
    SetOption,
    method_settings,
    read_recipe,
)
from smelt.report.numbers import count, seconds, size

if TYPE_CHECKING:
    from smelt.compression.recipe.plan import CompressionPlan

OutOption = Annotated[Path, typer.Option("-o", "--out", help="Where the result would be written.", rich_help_panel=RUN)]


DataOption = Annotated[
    str | None, typer.Option("--data", help="Calibration data: a file, a hub id, or default.", rich_help_panel=DATA)
]


def run(
    model: ModelArgument,
    recipe: RecipeOption = None,
    method: MethodOption = None,
    bits: BitsOption = None,
    group_size: GroupSizeOption = None,
    parameters: SetOption = None,
    budget: BudgetOption = None,
    out: OutOption = Path("smelted"),
    data: DataOption = None,
    samples: SamplesOption = None,
    length: LengthOption = None,
    device: DeviceOption = "auto",
    json_file: JsonOption = None,
    seed: SeedOverride = None,
) -> None:
    from smelt.compression.recipe.plan import plan as make_plan

    settings = method_settings(bits, group_size, parameters)
    read = read_recipe(
        recipe, method=method, settings=settings, budget=budget, samples=samples, length=length, data=data, seed=seed
    )
    plan = make_plan(model, read, out, device=device)
    show(plan)
    write_json(json_file, plan.to_json())
    plan.check()


def show(plan: CompressionPlan) -> None:
    rows = [
        ["parameters", count(plan.parameters)],
        ["in blocks, before", count(plan.block_parameters)],
        ["in blocks, after (at most)", count(plan.block_parameters_after)],
        ["weights, before", size(plan.bytes)],
        ["weights, after", f"{size(plan.bytes_after)}, {plan.bytes_after / plan.bytes:.2f} of before"],
        ["peak memory", f"{size(plan.peak_memory)} of {size(plan.available_memory)} available on {plan.device}"],
        ["disk", f"{size(plan.disk)} of {size(plan.free_disk)} free"],
        ["time", seconds(plan.seconds)],
        ["opens in", ", ".join(plan.opens_in)],
    ]
    console.print(table(f"Plan for {plan.model}", ["", "estimate"], rows))
    steps = [
        [step.method, ", ".join(f"{k} {v:g}" for k, v in step.budget.items()), seconds(step.seconds), size(step.memory)]
        for step in plan.steps
    ]
    console.print(table("Steps", ["method", "budget", "time", "memory beyond weights"], steps))
