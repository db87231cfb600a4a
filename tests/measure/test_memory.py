"""Memory: the peak of a region is recorded after it was freed, and cgroup limits count."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from smelt.measure.memory import PeakMemory, available_memory, free_disk

MEGABYTE = 10**6


SPIKES = """
import json, time
import numpy as np
from smelt.measure.memory import PeakMemory, resident_bytes

def spike(megabytes, region):
    block = np.ones(megabytes * 10**6, dtype=np.uint8)
    end = time.monotonic() + 60
    while region.peak_bytes < resident_bytes() - 10**7 and time.monotonic() < end:
        time.sleep(0.01)  # on a busy machine, a sample may take long to come
    assert block[-1] == 1

with PeakMemory() as first:
    spike(300, first)
after = resident_bytes()
with PeakMemory() as second:
    spike(100, second)
with PeakMemory() as outer:
    spike(200, outer)
    with PeakMemory() as inner:
        pass
regions = {"first": first, "second": second, "outer": outer, "inner": inner}
figures = {name: [region.before_bytes, region.peak_bytes, region.added_bytes] for name, region in regions.items()}
print(json.dumps({**figures, "after": after}))
"""


@pytest.fixture(scope="module")
def spikes() -> dict[str, Any]:
    """Measure regions in a separate process: here, leftovers of earlier tests may be freed at any time."""
    child = subprocess.run([sys.executable, "-c", SPIKES], capture_output=True, text=True, check=True)
    return dict(json.loads(child.stdout))


def test_peak_is_kept_after_the_memory_was_freed(spikes: dict[str, Any]) -> None:
    before, peak, added = spikes["first"]
    assert 250 * MEGABYTE < added < 400 * MEGABYTE
    assert peak == before + added
    assert spikes["after"] < peak - 200 * MEGABYTE


def test_a_second_smaller_region_does_not_see_the_first(spikes: dict[str, Any]) -> None:
    """Half of it is enough: the system may reclaim other pages of a busy machine's process meanwhile."""
    assert 50 * MEGABYTE < spikes["second"][2] < 200 * MEGABYTE


def test_regions_nest(spikes: dict[str, Any]) -> None:
    assert spikes["outer"][2] > 150 * MEGABYTE and spikes["inner"][2] < 50 * MEGABYTE


def test_an_error_inside_passes_and_ends_the_sampling() -> None:
    threads = threading.active_count()
    with pytest.raises(KeyError), PeakMemory() as memory:
        raise KeyError("inside")
    assert memory.peak_bytes >= memory.before_bytes > 0
    assert threading.active_count() == threads


def machine_tree(root: Path, files: dict[str, str]) -> Path:
    common = {"proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 4000 kB\n"}
    for name, text in {**common, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_cgroup_the_system_memory_counts(tmp_path: Path) -> None:
    assert available_memory(machine_tree(tmp_path, {})) == 4000 * 1024


def cgroup(folder: str, limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cache}\n"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": f"{usage}\n", f"{folder}/memory.stat": stat}


def test_cgroup_2_limit_counts_and_its_cache_does_not(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/box\n", **cgroup("sys/fs/cgroup/box", "1000000\n", 600000, cache=50000)}
    assert available_memory(machine_tree(tmp_path, files)) == 450000


def test_cgroup_2_limit_of_a_parent_counts(tmp_path: Path) -> None:
    own = cgroup("sys/fs/cgroup/box/task", "max\n", 600000)
    parent = cgroup("sys/fs/cgroup/box", "900000\n", 600000)
    files = {"proc/self/cgroup": "0::/box/task\n", **own, **parent}
    assert available_memory(machine_tree(tmp_path, files)) == 300000


def test_cgroup_2_inside_a_container_is_at_the_mount(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../../docker/abc\n", **cgroup("sys/fs/cgroup", "700000\n", 600000)}
    assert available_memory(machine_tree(tmp_path, files)) == 100000


def test_cgroup_1_limit_counts_and_unlimited_does_not(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:devices:/\n4:memory:/box\n0::/\n",
        f"{folder}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{folder}/memory.usage_in_bytes": "0\n",
        f"{folder}/memory.stat": "total_inactive_file 0\n",
    }
    assert available_memory(machine_tree(tmp_path, files)) == 4000 * 1024
    for name, text in {"limit_in_bytes": "500000", "usage_in_bytes": "300000"}.items():
        files[f"{folder}/box/memory.{name}"] = text
    files[f"{folder}/box/memory.stat"] = "total_inactive_file 1000\n"
    assert available_memory(machine_tree(tmp_path, files)) == 201000


def test_a_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/box\n", **cgroup("sys/fs/cgroup/box", "1000\n", 2000)}
    assert available_memory(machine_tree(tmp_path, files)) == 0


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory() < 2**50


def test_free_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "not" / "there" / "yet") == pytest.approx(free_disk(tmp_path), rel=0.2)
    assert free_disk(tmp_path) > 0


@pytest.mark.gpu
def test_peak_on_the_device() -> None:
    torch.ones(1, device="cuda")
    with PeakMemory() as memory:
        torch.ones(100 * MEGABYTE, dtype=torch.uint8, device="cuda")
    assert memory.device_peak_bytes >= 100 * MEGABYTE
    assert memory.device_peak_bytes > torch.cuda.memory_allocated() + 90 * MEGABYTE
