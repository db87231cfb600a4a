"""`smelt qat`: train a model at low precision, pack it, and end like `smelt compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smelt.cli.compress import (
    DataOption,
    EvalOption,
    MaxDropOption,
    OutOption,
    PromptOption,
    ResumeOption,
    SignKeyOption,
    SpeedOption,
    run_recipe,
)
from smelt.cli.output import DeviceOption, JsonOption, ModelArgument, WorkloadOption
from smelt.cli.recipes import (
    LengthOption,
    RecipeOption,
    SamplesOption,
    SeedOverride,
    SetOption,
    method_settings,
    read_recipe,
)
from smelt.cli.workers import WorkersOption
from smelt.errors import RecipeError

MethodOption = Annotated[
    str | None, typer.Option("--method", help="qat (the default), tsld, speq, ... instead of a recipe.")
]


def run(
    context: typer.Context,
    model: ModelArgument,
    out: OutOption,
    recipe: RecipeOption = None,
    method: MethodOption = None,
    parameters: SetOption = None,
    data: DataOption = None,
    samples: SamplesOption = None,
    length: LengthOption = None,
    eval_data: EvalOption = None,
    max_drop: MaxDropOption = None,
    workers: WorkersOption = 1,
    resume: ResumeOption = False,
    prompt: PromptOption = None,
    speed: SpeedOption = True,
    workload: WorkloadOption = "chat",
    device: DeviceOption = "auto",
    sign_key: SignKeyOption = None,
    json_file: JsonOption = None,
    seed: SeedOverride = None,
) -> None:
    if recipe is None and method is None:
        method = "qat"
    read = read_recipe(
        recipe, method=method, settings=method_settings(None, None, parameters), samples=samples, length=length,
        data=data, evaluation=eval_data, max_drop=max_drop, seed=seed,
    )  # fmt: skip
    if not any(step.trains for step in read.steps):
        raise RecipeError(
            f"{read.steps[0].name} does not train the model; use `smelt compress`, or a method such as qat."
        )
    run_recipe(
        context.obj, model, read, Path(out), json_file,
        workers=workers, device=device, resume=resume, speed=speed, workload=workload, samples=prompt,
        sign_key=sign_key,
    )  # fmt: skip
