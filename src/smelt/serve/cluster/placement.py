"""How many replicas, where, and what each of them takes of a machine."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from smelt.errors import SmeltError


@dataclass(frozen=True)
class Placement:
    """What Ray is asked for."""

    replicas: int
    cluster: str = ""  # the address of a Ray that runs; none: on this machine
    cpus: float = 1.0  # of each; also the threads of its engine, unless OMP_NUM_THREADS says otherwise
    gpus: int = 0  # of each


def placed(replicas: int, cluster: str, cpus: float | None, device: str, devices: int) -> Placement:
    """From what a user said. On this machine the cores are shared out; of a cluster's each replica takes one."""
    if importlib.util.find_spec("ray") is None:
        raise SmeltError("replicas need Ray; `pip install 'smelt[cluster]'`.")
    if cluster.startswith("ray://"):
        raise SmeltError(
            f"{cluster} is the address of Ray's client, through which answers cannot be streamed; run this on a "
            "machine of the cluster and give HOST:PORT of its head, or auto."
        )
    if ":" in device:
        raise SmeltError(f"Ray chooses a GPU for each replica; use --device cuda instead of {device}.")
    share = 1 if cluster else max(1, (os.cpu_count() or 1) // replicas)
    return Placement(replicas, cluster, cpus or share, devices if device == "cuda" else 0)
