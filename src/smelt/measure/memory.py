"""Measure peak memory, and the free memory and disk space."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from types import TracebackType

import torch

SAMPLE_SECONDS = 0.005
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the resident memory of this process, or its lifetime peak where the system reports no current value."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return _lifetime_peak_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def _lifetime_peak_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class PeakMemory:
    """The peak resident memory of this process inside a `with` block, sampled every 5 ms by a thread.

    `device_peak_bytes` is torch's peak allocation summed over all CUDA devices (0 without one). Blocks may be nested
    for resident memory, but not for CUDA: torch's counter is reset on entry.
    """

    def __init__(self) -> None:
        self.before_bytes = 0
        self.peak_bytes = 0
        self.device_peak_bytes = 0
        self._lifetime_before = 0
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    @property
    def added_bytes(self) -> int:
        """The peak above the resident memory on entry."""
        return self.peak_bytes - self.before_bytes

    def __enter__(self) -> PeakMemory:
        if torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
        self._lifetime_before = _lifetime_peak_bytes()
        self.before_bytes = self.peak_bytes = resident_bytes()
        self._sampler.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._sampler.join()
        self.peak_bytes = max(self.peak_bytes, resident_bytes())
        # If the lifetime peak grew, it did so inside the block; it is exact, and includes peaks between two samples.
        lifetime_peak = _lifetime_peak_bytes()
        if lifetime_peak > self._lifetime_before:
            self.peak_bytes = max(self.peak_bytes, lifetime_peak)
        if torch.cuda.is_initialized():
            devices = range(torch.cuda.device_count())
            self.device_peak_bytes = sum(torch.cuda.max_memory_allocated(index) for index in devices)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, resident_bytes())


def total_memory(device: torch.device) -> int:
    """Return the total memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes this process can still allocate: the system's free memory, or less if its cgroup limits it.

    `root` is where `proc` and `sys` are mounted.
    """
    return max(0, min([_system_available(root), *_cgroup_headrooms(root)]))


def _system_available(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kilobytes * 1024


def _cgroup_headrooms(root: Path) -> list[int]:
    """Return the free memory of each cgroup from this process's own up to the root, for cgroup v1 and v2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    headrooms: list[int | None] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders = _with_parents(root / "sys/fs/cgroup", path)
            headrooms += [_headroom(folder, "memory.max", "memory.current", "inactive_file") for folder in folders]
        elif "memory" in controllers.split(","):
            folders = _with_parents(root / "sys/fs/cgroup/memory", path)
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            headrooms += [_headroom(folder, *names) for folder in folders]
    return [headroom for headroom in headrooms if headroom is not None]


def _with_parents(mount: Path, path: str) -> list[Path]:
    """Return the cgroup's folder and its parents up to the mount, since in a container the path may not exist."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _headroom(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Return limit minus usage, not counting reclaimable page cache; None without a limit."""
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        statistics = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if limit == "max":
        return None
    cache = next((int(line.split()[1]) for line in statistics if line.split()[0] == cache_name), 0)
    return int(limit) - usage + cache


def free_disk(path: Path | str) -> int:
    """Return the free bytes on the disk of `path` or its nearest existing parent."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
