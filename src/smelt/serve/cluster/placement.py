"""Placement of replicas: how many, where, and the resources of each."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from smelt.errors import SmeltError, install_command
from smelt.serve.server.settings import ServeConfig


@dataclass(frozen=True)
class Placement:
    """The replicas to request from Ray."""

    replicas: int
    ray_address: str = ""  # address of a running Ray cluster; empty: this machine
    cpus: float = 1.0  # per replica; also its engine's threads, unless OMP_NUM_THREADS is set
    gpus: int = 0  # per replica


def resolve_placement(config: ServeConfig) -> Placement:
    """Resolve the user's options. By default replicas on this machine share its cores; in a cluster each gets one."""
    ray_address, device = config.ray_address, config.device
    if importlib.util.find_spec("ray") is None:
        raise SmeltError(f"replicas need Ray; `{install_command('cluster')}`.")
    if ray_address.startswith("ray://"):
        raise SmeltError(
            f"{ray_address} is a Ray Client address, which cannot stream answers; run this on a "
            "machine of the cluster and give HOST:PORT of its head node, or auto."
        )
    if ":" in device:
        raise SmeltError(f"Ray chooses a GPU for each replica; use --device cuda instead of {device}.")
    share = 1 if ray_address else max(1, (os.cpu_count() or 1) // config.replicas)
    gpus = config.tensor_parallel_size if device == "cuda" else 0
    return Placement(config.replicas, ray_address, config.replica_cpus or share, gpus)
