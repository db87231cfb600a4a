"""Plan how FSDP2 shards the model of a training configuration over the ranks: the work of `smelt shard-plan`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch.distributed.device_mesh import init_device_mesh

from smelt.errors import ConfigError
from smelt.measure.machine import machine
from smelt.train.fsdp.parallelize import apply_plan
from smelt.train.fsdp.plan import ClusterSpec, ModelProfile
from smelt.train.fsdp.profile import estimate_layers, measure_collectives, profile_layers
from smelt.train.fsdp.search import PlanSearchResult, search_plan
from smelt.train.fsdp.timeline import StepTimeline
from smelt.train.fsdp.trace import measure_timeline
from smelt.train.gradients.comm import Comm
from smelt.train.trainer.config import FP8, FP8_CHUNKED, TrainConfig
from smelt.train.trainer.distributed import init_distributed
from smelt.train.trainer.optimizer import autocast
from smelt.train.trainer.tasks import TrainingTask, build_task

_STATE_FACTORS = {"adamw": 4.0, "sgd": 2.0}  # copies of a parameter with its gradient and the optimizer's state
_MOMENTUM_FACTOR = 1.0  # one more


def plan_and_measure(
    config: TrainConfig, name: str, memory_gb: float | None, tflops: float | None, seed: int
) -> dict[str, Any] | None:
    """Plan with the other ranks, apply the plan and time a step of it; return everything on rank 0, None on the others.

    `memory_gb` limits a rank; with `tflops` the layers' times are estimated instead of measured.
    """
    if config.precision in (FP8, FP8_CHUNKED):
        raise ConfigError(f"plans are not measured in {config.precision}; set precision to bf16.")
    device = init_distributed(config.device, config.timeout)
    try:
        comm = Comm()
        task = build_task(config)
        task.network.to(device).train()
        step = _training_step(task, config, comm, device, seed)
        model = (
            profile_layers(task.network, step, comm, device)
            if tflops is None
            else estimate_layers(task.network, step, 1e12 * tflops, comm, device)
        )
        cluster = _cluster_spec(config, memory_gb, comm, device)
        result = search_plan(model, cluster)
        task.network.zero_grad()
        apply_plan(result.plan, model, task.network, init_device_mesh(device.type, (comm.world_size,)))
        measured = measure_timeline(result.plan, model, task.network, step, device)
        return None if comm.rank else _report_content(name, model, cluster, result, measured)
    finally:
        distributed.destroy_process_group()


def _report_content(
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
