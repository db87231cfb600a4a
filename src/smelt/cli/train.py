"""`smelt train`: train a model, with gradient compression, on the ranks of this machine or of torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smelt.cli.app import Invocation
from smelt.cli.workers import WorkersOption, in_worker, run_workers

GradientsOption = Annotated[
    str | None,
    typer.Option("--gradients", help="none, auto, bf16 or a compressor such as exdyna:density=0.001."),
]


def run(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file (docs/training.md).")],
    workers: WorkersOption = 1,
    gradients: GradientsOption = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The folder of the run (default: runs/NAME of the file).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder, if there is one.")] = False,
    resplit: Annotated[bool, typer.Option("--resplit", help="Continue with another number of ranks.")] = False,
) -> None:
    invocation: Invocation = context.obj
    if workers > 1 and not in_worker():
        raise typer.Exit(run_workers(invocation.again, workers))
    from smelt.train.trainer.entrypoint import exit_process, run_and_report, train

    exit_process(
        run_and_report(
            lambda: train(config, gradients=gradients, out=out, resume=resume, resplit=resplit), invocation.debug
        )
    )
