"""A full disk at any moment: one sentence, nothing half-written, and --resume continues once there is space."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from smelt.compression.recipe.plan import CompressionPlan
from tests.cli.conftest import Forked, Place, Smelt, llama_recipe, resume, same_bytes

pytestmark = pytest.mark.usefixtures("quick")


class Disk:
    """A separate file system that can be resized."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def resize(self, kilobytes: int, *, new: bool = False) -> bool:
        options = f"size={kilobytes}k" if new else f"remount,size={kilobytes}k"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    try:
        mounted = disk.resize(4, new=True)
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small disk takes root's rights")
    yield disk
    subprocess.run(["umount", str(disk.folder)], check=True)


def test_disk_full_at_any_moment(
    disk: Disk, place: Place, smelt_here: Smelt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk grows after each failure, so that the run fails a little later each time."""
    monkeypatch.setattr(CompressionPlan, "check", lambda _: None)  # it would refuse most of these before they start
    arguments = ["compress", place / "llama", "-r", place / "llama.yaml", "--no-speed", "-o"]
    out, failed_at = disk.folder / "out", set()
    for size in range(4, 600, 32):
        disk.resize(size)
        done = smelt_here(*arguments, str(out), *resume(out))
        if done.code == 0:
            break
        done.refused("the disk is full")
        assert not out.exists()
        assert not list(disk.folder.rglob("*.tmp"))
        failed_at.add(done.err.split("the disk is full: ")[1].split()[0])
    assert done.code == 0, done
    assert len(failed_at) > 3, failed_at
    assert smelt_here(*arguments, str(tmp_path / "whole")).code == 0
    assert same_bytes(out, tmp_path / "whole")


def test_a_full_disk_is_predicted(disk: Disk, place: Place, smelt_here: Smelt) -> None:
    out = disk.folder / "out"
    done = smelt_here("compress", place / "llama", "-r", place / "llama.yaml", "-o", str(out))
    done.refused("of disk and 0 B is free")
    assert list(disk.folder.iterdir()) == []


def test_disk_full_while_writing_json(disk: Disk, place: Place, smelt_here: Smelt) -> None:
    (disk.folder / "filling").write_bytes(b"x" * 4096)
    done = smelt_here("inspect", place / "llama", "--json", str(disk.folder / "r.json"))
    done.refused("the disk is full")
    assert [path.name for path in disk.folder.iterdir()] == ["filling"]


def test_disk_full_while_spilling_activations(disk: Disk, place: Place, forked: Forked) -> None:
    content = {**llama_recipe(place), "memory_limit": "1 kB"}
    content["data"] |= {"samples": 64, "seq_len": 128}
    disk.resize(256)
    out = str(disk.folder / "out")
    done = forked("compress", place / "llama", "-r", place.recipe("limited.yaml", content), "-o", out, "--no-speed")
    done.refused("the disk is full")
