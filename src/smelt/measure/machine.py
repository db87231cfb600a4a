"""Describe the machine of a measurement: hardware and versions, but no host, user or folder names."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from smelt.measure.clock import stopwatch
from smelt.version import __version__

# The keys of the CPU name in /proc/cpuinfo, on x86 and on most ARM machines.
_CPUINFO_NAMES = ("model name", "Model")
# Servers with ARM cores have numbers instead: those of Arm's designs (implementer 0x41) that are common there.
_ARM_PARTS = {
    "0xd08": "Cortex-A72", "0xd0c": "Neoverse N1", "0xd40": "Neoverse V1", "0xd49": "Neoverse N2",
    "0xd4f": "Neoverse V2", "0xd84": "Neoverse V3", "0xd8e": "Neoverse N3",
}  # fmt: skip


def cpu_model() -> str:
    """Return the name of this machine's CPU."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    return cpu_name(cpuinfo) or platform.processor() or platform.machine()


def cpu_name(cpuinfo: str) -> str:
    """Return the CPU name in the text of /proc/cpuinfo; empty if there is none."""
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    named = {key.strip(): " ".join(value.split()) for key, value in fields.items()}
    name = next((named[key] for key in _CPUINFO_NAMES if named.get(key)), "")
    implementer, part = named.get("CPU implementer", ""), named.get("CPU part", "")
    if name or not part:
        return name
    if implementer == "0x41" and part in _ARM_PARTS:
        return _ARM_PARTS[part]
    return f"ARM core {part} of implementer {implementer}"


def gpu_model() -> str | None:
    """Return the name of the first CUDA device, or None if there is none."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def cores() -> int:
    """Return the number of cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Return the facts needed to interpret or repeat a measurement."""
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "os": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} ({platform.machine()})",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": metadata.version("transformers"),
        "smelt": __version__,
    }
    gpu = gpu_model()
    if gpu is not None:
        facts["gpu"] = gpu
        facts["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    return facts


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy on a device reads and writes together."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = stopwatch(device)
    for _ in range(2):
        target.copy_(source)
    return 2 * size / min(clock(lambda: target.copy_(source)) for _ in range(8))
