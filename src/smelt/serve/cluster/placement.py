"""Placement of replicas: how many, where, and the resources of each."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from smelt.errors import SmeltError


@dataclass(frozen=True)
class Placement:
    """The replicas to request from Ray."""

    replicas: int
    cluster: str = ""  # address of a running Ray cluster; empty: this machine
    cpus: float = 1.0  # per replica; also its engine's threads, unless OMP_NUM_THREADS is set
    gpus: int = 0  # per replica


def placed(replicas: int, cluster: str, cpus: float | None, device: str, devices: int) -> Placement:
    """Resolve the user's options. By default replicas on this machine share its cores; in a cluster each gets one."""
    if importlib.util.find_spec("ray") is None:
        raise SmeltError("replicas need Ray; `pip install 'smelt[cluster]'`.")
    if cluster.startswith("ray://"):
        raise SmeltError(
            f"{cluster} is a Ray Client address, which cannot stream answers; run this on a "
            "machine of the cluster and give HOST:PORT of its head node, or auto."
        )
    if ":" in device:
        raise SmeltError(f"Ray chooses a GPU for each replica; use --device cuda instead of {device}.")
    share = 1 if cluster else max(1, (os.cpu_count() or 1) // replicas)
    return Placement(replicas, cluster, cpus or share, devices if device == "cuda" else 0)
