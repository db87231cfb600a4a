"""`smelt train`: train a model, with gradient compression, on the ranks of this machine or of torchrun."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from smelt.cli.app import Invocation
from smelt.cli.workers import WorkersOption, in_worker, run_workers
from smelt.errors import ConfigError
from smelt.subprocesses import python_command, python_environment

GradientsOption = Annotated[
    str | None,
    typer.Option("--gradients", help="none, auto, bf16 or a compressor such as exdyna:density=0.001."),
]


def run(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file (docs/training.md).")],
    workers: WorkersOption = 1,
    gradients: GradientsOption = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="off, bf16, fp16, fp8 or fp8-chunked; overrides the file.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="Train in this precision too, into OUT-PRECISION, and compare: bf16."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The folder of the run (default: runs/NAME of the file).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder, if there is one.")] = False,
    resplit: Annotated[bool, typer.Option("--resplit", help="Continue with another number of ranks.")] = False,
) -> None:
    invocation: Invocation = context.obj
    if baseline is not None and not in_worker():
        options = ["--workers", str(workers)] + (["--gradients", gradients] if gradients is not None else [])
        flags = ["--resume"] * resume + ["--resplit"] * resplit + ["--debug"] * invocation.debug
        raise typer.Exit(_train_both(config, precision, baseline, out, [*options, *flags]))
    if workers > 1 and not in_worker():
        raise typer.Exit(run_workers(invocation.again, workers))
    from smelt.train.trainer.entrypoint import exit_process, run_and_report, train

    exit_process(
        run_and_report(
            lambda: train(config, gradients=gradients, precision=precision, out=out, resume=resume, resplit=resplit),
            invocation.debug,
        )
    )


def _train_both(config: Path, precision: str | None, baseline: str, out: Path | None, options: list[str]) -> int:
    """Train in both precisions, one after the other, and write a page that compares the runs."""
    from smelt.cli.train_report import run as report
    from smelt.train.trainer.config import TrainConfig
    from smelt.train.trainer.entrypoint import run_folder_path

    chosen = TrainConfig.load(config, precision=precision).precision
    if TrainConfig.load(config, precision=baseline).precision == chosen:
        raise ConfigError(f"the run is in {chosen} already; give --baseline another precision.")
    out = run_folder_path(config, out)
    folders = {chosen: out, baseline: out.with_name(f"{out.name}-{baseline}")}
    for name, folder in folders.items():
        arguments = ["train", str(config), "--precision", name, "--out", str(folder), *options]
        code = subprocess.run(python_command("-m", "smelt.cli.main", *arguments), env=python_environment()).returncode
        if code:
            return code
    report(list(folders.values()), report=out / "comparison.html")
    return 0
