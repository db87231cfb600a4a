"""`smelt shard-plan`: plan how FSDP2 shards a model over the ranks of torchrun; compare prediction and measurement."""

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
from smelt.train.fsdp.parallelize import apply_plan
from smelt.train.fsdp.plan import ClusterSpec, ModelProfile
from smelt.train.fsdp.profile import estimate_layers, measure_collectives, profile_layers
from smelt.train.fsdp.search import PlanSearchResult, search_plan
from smelt.train.fsdp.timeline import StepTimeline
from smelt.train.fsdp.trace import measure_timeline
from smelt.train.gradients.comm import Comm
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.distributed import init_distributed
from smelt.train.trainer.optimizer import autocast
from smelt.train.trainer.tasks import TrainingTask, build_task

_STATE_FACTORS = {"adamw": 4.0, "sgd": 2.0}  # copies of a parameter with its gradient and the optimizer's state
_MOMENTUM_FACTOR = 1.0  # one more

MemoryOption = Annotated[
    float | None,
    typer.Option("--memory-gb", help="Memory limit per rank (default: all of its GPU, unlimited on CPU)."),
]
FlopsOption = Annotated[
    float | None,
    typer.Option("--tflops", help="Estimate layer times from FLOPs at this speed (default: measure them)."),
]


def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file as for `python -m smelt.train`.")],
    memory_gb: MemoryOption = None,
    tflops: FlopsOption = None,
    report: Annotated[Path | None, typer.Option("-o", "--report", help="Also write a page with timelines.")] = None,
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    train_config = TrainConfig.load(config)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ConfigError(
            "smelt shard-plan plans for several ranks; start it with "
            "`torchrun --nproc-per-node 2 -m smelt.cli.main shard-plan CONFIG`."
        )
    if report is not None:
        check_writable(report)
    device = init_distributed(train_config.device, train_config.timeout)
    try:
        comm = Comm()
        task = build_task(train_config)
        task.network.to(device).train()
        step = _training_step(task, train_config, comm, device, seed)
        model = (
            profile_layers(task.network, step, comm, device)
            if tflops is None
            else estimate_layers(task.network, step, 1e12 * tflops, comm, device)
        )
        cluster = _cluster_spec(train_config, memory_gb, comm, device)
        result = search_plan(model, cluster)
        task.network.zero_grad()
        apply_plan(result.plan, model, task.network, init_device_mesh(device.type, (comm.world_size,)))
        measured = measure_timeline(result.plan, model, task.network, step, device)
        if not comm.rank:
            content = report_content(config.stem, model, cluster, result, measured)
            show(content)
            write_json(json_file, content)
            if report is not None:
                write_page(render_shard_plan(content), report)
                say(f"{report} is written.")
    finally:
        distributed.destroy_process_group()


def show(content: dict[str, Any]) -> None:
    title = f"{content['name']} on {content['world_size']} ranks"
    console.print(table(f"{title}: predicted / measured", HEADINGS, unit_rows(content)))
    console.print(table("One step", ["", "predicted", "measured"], step_rows(content)))
    console.print(table("What the plan is based on", ["", "value"], fact_rows(content)))


def report_content(
    name: str, model: ModelProfile, cluster: ClusterSpec, result: PlanSearchResult, measured: StepTimeline
) -> dict[str, Any]:
    """Return all that is shown, as plain data."""
    units = [
        {
            "name": _unit_name(unit.names(model)),
            "layers": unit.names(model),
            "bytes": sum(layer.bytes for layer in unit.layers(model)),
            "reshard_after_forward": unit.reshard_after_forward,
        }
        for unit in result.plan.units
    ]
    return {
        "name": name,
        "world_size": cluster.world_size,
        "memory": cluster.memory if math.isfinite(cluster.memory) else None,
        "forward_prefetch": result.plan.forward_prefetch,
        "backward_prefetch": result.plan.backward_prefetch,
        "exhaustive": result.exhaustive,
        "units": units,
        "root": {"name": "root", "bytes": model.root.bytes},
        "predicted": result.timeline.to_json(),
        "measured": measured.to_json(),
        "cluster": {**cluster.to_json(), "memory": None},
        "model": model.to_json(),
        "machine": machine(),
    }


def _unit_name(layers: list[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def _training_step(
    task: TrainingTask, config: TrainConfig, comm: Comm, device: torch.device, seed: int
) -> Callable[[], None]:
    """Return forward and backward of this rank's first samples, the same each time."""
    indices = np.arange(comm.rank * config.batch_size, (comm.rank + 1) * config.batch_size) % len(task.train)
    batch = {name: tensor.to(device) for name, tensor in task.train.batch(indices).items()}

    def step() -> None:
        task.network.zero_grad()
        torch.manual_seed(seed)
        with autocast(config.precision, device):
            loss = task.network(**batch, **task.forward_kwargs).loss
        loss.backward()

    return step


def _cluster_spec(config: TrainConfig, memory_gb: float | None, comm: Comm, device: torch.device) -> ClusterSpec:
    all_gather, reduce_scatter = measure_collectives(comm, device)
    on_gpu = device.type == "cuda"
    memory = float(torch.cuda.get_device_properties(device).total_memory) if on_gpu else math.inf
    if memory_gb is not None:
        memory = 1e9 * memory_gb
    state_factor = _STATE_FACTORS[config.optimizer.name] + (_MOMENTUM_FACTOR if config.optimizer.momentum else 0.0)
    return ClusterSpec(comm.world_size, all_gather, reduce_scatter, memory, overlap=on_gpu, state_factor=state_factor)
