"""`smelt shard-plan`: plan how FSDP2 shards a model over several ranks; compare prediction and measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cli.output import JsonOption, SeedOption, console, say, table, write_json
from smelt.cli.workers import WorkersOption, in_worker, run_workers
from smelt.files import check_writable
from smelt.report.page import write_page
from smelt.report.sharding import HEADINGS, fact_rows, render_shard_plan, step_rows, unit_rows

MemoryOption = Annotated[
    float | None,
    typer.Option("--memory-gb", help="Memory limit per rank (default: all of its GPU, unlimited on CPU)."),
]
FlopsOption = Annotated[
    float | None,
    typer.Option("--tflops", help="Estimate layer times from FLOPs at this speed (default: measure them)."),
]


def run(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file as for `smelt train`.")],
    memory_gb: MemoryOption = None,
    tflops: FlopsOption = None,
    report: Annotated[Path | None, typer.Option("-o", "--report", help="Also write a page with timelines.")] = None,
    workers: WorkersOption = 2,
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    from smelt.train.trainer.config import TrainConfig

    train_config = TrainConfig.load(config)
    if report is not None:
        check_writable(report)
    if not in_worker():
        raise typer.Exit(run_workers(context.obj.again, workers))
    from smelt.train.fsdp.planning import plan_and_measure

    content = plan_and_measure(train_config, config.stem, memory_gb, tflops, seed)
    if content is None:
        return
    show(content)
    write_json(json_file, content)
    if report is not None:
        write_page(render_shard_plan(content), report)
        say(f"{report} is written.")


def show(content: dict[str, Any]) -> None:
    title = f"{content['name']} on {content['world_size']} ranks"
    console.print(table(f"{title}: predicted / measured", HEADINGS, unit_rows(content)))
    console.print(table("One step", ["", "predicted", "measured"], step_rows(content)))
    console.print(table("What the plan is based on", ["", "value"], fact_rows(content)))
