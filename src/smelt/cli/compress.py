"""`smelt compress`: compress a model, verify that it reloads, and report what it cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smelt.cli.app import Invocation
from smelt.cli.output import (
    DATA,
    RUN,
    SPEED,
    DeviceOption,
    JsonOption,
    ModelArgument,
    WorkloadOption,
    console,
    say,
    write_json,
)
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
from smelt.cli.workers import WorkersOption, in_worker, run_workers
from smelt.errors import RecipeError
from smelt.progress import progress_bars
from smelt.report.terminal import sample_lines, summary_table

if TYPE_CHECKING:
    from smelt.compression.recipe.recipe import Recipe

OutOption = Annotated[
    Path, typer.Option("-o", "--out", help="Output folder; it must not exist yet.", rich_help_panel=RUN)
]
DataOption = Annotated[
    str | None, typer.Option("--data", help="Calibration data: a file, a hub id, or default.", rich_help_panel=DATA)
]
EvalOption = Annotated[
    str | None,
    typer.Option("--eval-data", help="Data on which the model before and after is compared.", rich_help_panel=DATA),
]
MaxDropOption = Annotated[
    str | None,
    typer.Option(
        "--max-drop",
        metavar="1pt|1%",
        help="Exit with 3 and write no model unless the result is worse by less than this, with 95 % confidence.",
        rich_help_panel=DATA,
    ),
]
GuardOption = Annotated[
    str | None,
    typer.Option(
        "--guard",
        metavar="speed[:FORMAT,...]",
        help="Layers that would be slower on this device and workload get one of these formats, or stay unquantized.",
        rich_help_panel=SPEED,
    ),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.", rich_help_panel=RUN)]
PromptOption = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="Complete this prompt with the model before and after.", rich_help_panel=DATA),
]
SpeedOption = Annotated[
    bool, typer.Option("--speed/--no-speed", help="Measure the speed of both models.", rich_help_panel=SPEED)
]

OffloadOption = Annotated[
    bool,
    typer.Option(
        "--offload",
        help="Keep the model in host memory; bring its blocks to the device one at a time.",
        rich_help_panel=RUN,
    ),
]

SignKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--sign-key", help="Sign the result with this private key (PEM, elliptic curve).", rich_help_panel=RUN
    ),
]


def run(
    context: typer.Context,
    model: ModelArgument,
    out: OutOption,
    recipe: RecipeOption = None,
    method: MethodOption = None,
    bits: BitsOption = None,
    group_size: GroupSizeOption = None,
    parameters: SetOption = None,
    budget: BudgetOption = None,
    data: DataOption = None,
    samples: SamplesOption = None,
    length: LengthOption = None,
    eval_data: EvalOption = None,
    max_drop: MaxDropOption = None,
    guard: GuardOption = None,
    workers: WorkersOption = 1,
    resume: ResumeOption = False,
    prompt: PromptOption = None,
    speed: SpeedOption = True,
    workload: WorkloadOption = "chat",
    speed_seconds: Annotated[
        float, typer.Option(min=1, help="Limit of the timing per model.", rich_help_panel=SPEED)
    ] = 60,
    device: DeviceOption = "auto",
    offload: OffloadOption = False,
    sign_key: SignKeyOption = None,
    json_file: JsonOption = None,
    seed: SeedOverride = None,
) -> None:
    settings = method_settings(bits, group_size, parameters)
    read = read_recipe(
        recipe, method=method, settings=settings, budget=budget, samples=samples, length=length, data=data,
        evaluation=eval_data, max_drop=max_drop, guard=guard, seed=seed,
    )  # fmt: skip
    run_recipe(
        context.obj, model, read, out, json_file,
        workers=workers, device=device, resume=resume, offload=offload, speed=speed, workload=workload,
        speed_seconds=speed_seconds, samples=prompt, sign_key=sign_key,
    )  # fmt: skip


def run_recipe(
    invocation: Invocation, model: str, recipe: Recipe, out: Path, json_file: Path | None, *, workers: int,
    device: str, **options: Any,
) -> None:  # fmt: skip
    """Compress on this process, or on several workers that share the steps that train, and print the result."""
    if workers > 1 and not in_worker():
        if not any(step.trains for step in recipe.steps):
            raise RecipeError(
                "no step of this recipe trains, so several workers have nothing to share; remove --workers."
            )
        raise typer.Exit(run_workers(invocation.again, workers))
    from smelt.compression.recipe.run import compress, take_part

    with process_group(device) as rank:
        if rank:
            take_part(model, recipe, out, device=device)
            return
        with progress_bars() as progress:
            result = compress(model, recipe, out, device=device, progress=progress, say=say, **options)
    console.print(summary_table(result.record))
    for line in sample_lines(result.record):
        console.print(line, soft_wrap=True)
    verdict = result.record.get("quality", {}).get("gate")
    if verdict is not None:
        console.print(f"gate passed: {verdict['sentence']}", soft_wrap=True)
    console.print(f"saved and verified: {out}    report: {out / 'report.html'}", soft_wrap=True)
    write_json(json_file, result.record)


@contextmanager
def process_group(device: str) -> Iterator[int]:
    """Join the other ranks if there are any; yield this one's number, 0 if it is alone."""
    if not in_worker():
        yield 0
        return
    import torch.distributed as distributed

    from smelt.train.trainer.distributed import init_distributed, report_lost_workers

    init_distributed(device, timeout=60.0)
    with report_lost_workers(lambda: "--resume continues from the last checkpoint."):
        yield distributed.get_rank()
    distributed.destroy_process_group()
