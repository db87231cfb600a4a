"""`smelt shard-plan`: how to shard a model over the workers of torchrun, and how well that was predicted."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as distributed
import typer
from torch.distributed.device_mesh import init_device_mesh

from smelt.cli.output import JsonOption, SeedOption, console, say, table, write_json
from smelt.errors import ConfigError
from smelt.files import check_writable
from smelt.measure.machine import machine
from smelt.report.page import write_page
from smelt.report.sharding import HEADINGS, fact_rows, render_shard_plan, step_rows, unit_rows
from smelt.train.fsdp.apply import apply_plan
from smelt.train.fsdp.facts import ClusterSpec, ModelProfile
from smelt.train.fsdp.profile import estimate_layers, profile_layers
from smelt.train.fsdp.search import PlanSearchResult, search_plan
from smelt.train.fsdp.timeline import Timeline
from smelt.train.fsdp.trace import measure_timeline
from smelt.train.fsdp.wire import measure_collectives
from smelt.train.gradients.comm import Workers
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.distributed import init_distributed
from smelt.train.trainer.images import images_task
from smelt.train.trainer.language import language_task
from smelt.train.trainer.optimizer import autocast
from smelt.train.trainer.task import TrainingTask

_KEPT = {"adamw": 4.0, "sgd": 2.0}  # copies of a parameter with its gradient and the optimiser's state
_MOMENTUM = 1.0  # one more

MemoryOption = Annotated[
    float | None,
    typer.Option("--memory-gb", help="What a worker may use; by default all of its GPU, and on a CPU any amount."),
]
SpeedOption = Annotated[
    float | None,
    typer.Option("--tflops", help="Work times out from operations at this speed; by default they are measured."),
]


def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file as `python -m smelt.train` takes it.")],
    memory_gb: MemoryOption = None,
    tflops: SpeedOption = None,
    report: Annotated[Path | None, typer.Option("-o", "--report", help="Also write a page with timelines.")] = None,
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    told = TrainConfig.load(config)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ConfigError(
            "smelt shard-plan plans for several workers; start it with "
            "`torchrun --nproc-per-node 2 -m smelt.cli.main shard-plan CONFIG`."
        )
    if report is not None:
        check_writable(report)
    device = init_distributed(told.device, told.timeout)
    try:
        workers = Workers()
        task = language_task(told) if told.task == "language" else images_task(told)
        task.network.to(device).train()
        step = _step(task, told, workers, device, seed)
        model = (
            profile_layers(task.network, step, workers, device)
            if tflops is None
            else estimate_layers(task.network, step, 1e12 * tflops, workers, device)
        )
        machines = _machines(told, memory_gb, workers, device)
        found = search_plan(model, machines)
        task.network.zero_grad()
        apply_plan(found.plan, model, task.network, init_device_mesh(device.type, (workers.size,)))
        real = measure_timeline(found.plan, model, task.network, step, device)
        if not workers.rank:
            content = content_of(config.stem, model, machines, found, real)
            show(content)
            write_json(json_file, content)
            if report is not None:
                write_page(render_shard_plan(content), report)
                say(f"{report} is written.")
    finally:
        distributed.destroy_process_group()


def show(content: dict[str, Any]) -> None:
    title = f"{content['name']} on {content['workers']} workers"
    console.print(table(f"{title}: predicted / measured", HEADINGS, unit_rows(content)))
    console.print(table("One step", ["", "predicted", "measured"], step_rows(content)))
    console.print(table("What the plan is made from", ["", "value"], fact_rows(content)))


def content_of(
    name: str, model: ModelProfile, machines: ClusterSpec, found: PlanSearchResult, real: Timeline
) -> dict[str, Any]:
    """All that is shown, as plain data."""
    units = [
        {
            "name": _name(unit.names(model)),
            "layers": unit.names(model),
            "bytes": sum(layer.bytes for layer in unit.of(model)),
            "reshard_after_forward": unit.reshard_after_forward,
        }
        for unit in found.plan.units
    ]
    return {
        "name": name,
        "workers": machines.workers,
        "memory": machines.memory if math.isfinite(machines.memory) else None,
        "forward_prefetch": found.plan.forward_prefetch,
        "backward_prefetch": found.plan.backward_prefetch,
        "exhaustive": found.exhaustive,
        "units": units,
        "root": {"name": "the rest", "bytes": model.rest.bytes},
        "predicted": found.timeline.to_json(),
        "measured": real.to_json(),
        "machines": {**machines.to_json(), "memory": None},
        "model": model.to_json(),
        "machine": machine(),
    }


def _name(layers: list[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def _step(
    task: TrainingTask, config: TrainConfig, workers: Workers, device: torch.device, seed: int
) -> Callable[[], None]:
    """Forward and backward of this worker's first samples, the same each time."""
    places = np.arange(workers.rank * config.batch, (workers.rank + 1) * config.batch) % len(task.train)
    batch = {name: tensor.to(device) for name, tensor in task.train.take(places).items()}

    def step() -> None:
        task.network.zero_grad()
        torch.manual_seed(seed)
        with autocast(config.precision, device):
            loss = task.network(**batch, **task.options).loss
        loss.backward()

    return step


def _machines(config: TrainConfig, memory_gb: float | None, workers: Workers, device: torch.device) -> ClusterSpec:
    gather, scatter = measure_collectives(workers, device)
    on_gpu = device.type == "cuda"
    memory = float(torch.cuda.get_device_properties(device).total_memory) if on_gpu else math.inf
    if memory_gb is not None:
        memory = 1e9 * memory_gb
    kept = _KEPT[config.optimizer.name] + (_MOMENTUM if config.optimizer.momentum else 0.0)
    return ClusterSpec(workers.size, gather, scatter, memory, beside=on_gpu, kept=kept)
