"""Ctrl-C at any moment: one sentence, exit code 130, nothing half-written, and --resume continues from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Forked, Moment, Place, resume, same_bytes

FILES = ["run.json", "quality-before.json", "gradients-00000.safetensors", "block-001.safetensors", "step-0", "out"]


def arguments(place: Place, out: Path) -> list[str]:
    return ["compress", place / "llama", "-r", place / "llama.yaml", "-o", str(out), "--no-speed", *resume(out)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_as_each_file_is_written(place: Place, forked: Forked, tmp_path: Path) -> None:
    """The signal comes just before each file's rename; the last file is the result itself."""
    out = tmp_path / "out"
    for file in FILES:
        moment = Moment(file, before=True, signal=signal.SIGINT)
        forked(*arguments(place, out), moment=moment).refused("stopped; finished work is kept", code=130)
        assert set(names(tmp_path)) <= {"out.partial"}, file
    assert forked(*arguments(place, out)).code == 0
    assert names(tmp_path) == ["out"]


def test_at_any_time(place: Place, forked: Forked, tmp_path: Path) -> None:
    """Wherever the run is after this many seconds."""
    out = tmp_path / "out"
    for seconds in (0.02, 0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.9):
        done = forked(*arguments(place, out), moment=Moment(seconds=seconds, signal=signal.SIGINT))
        if done.code == 0:
            break
        done.refused("stopped; finished work is kept", code=130)
        if out.exists():  # stopped after the result had its name
            break
        assert set(names(tmp_path)) <= {"out.partial"}, seconds
    else:
        assert forked(*arguments(place, out)).code == 0
    assert forked(*arguments(place, tmp_path / "whole")).code == 0
    assert same_bytes(out, tmp_path / "whole")


def test_while_the_clean_process_verifies_the_result(place: Place, forked: Forked, tmp_path: Path) -> None:
    """In a terminal the child gets the signal too; its own message must not appear."""
    out = tmp_path / "out"
    running = forked.start(*arguments(place, out), quick=False)
    running.stop_when_it_says("reloading in a clean process")
    running.wait().refused("stopped; finished work is kept", code=130)
    assert names(tmp_path) == ["out.partial"]
    assert not [name for name in names(tmp_path / "out.partial") if name.endswith(".tmp")]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see how far a process is")
@pytest.mark.parametrize("library", ["_multiarray_umath", "libtorch_cpu", "_safetensors_rust"])
def test_while_still_importing(library: str) -> None:
    """An interrupted import must not print a traceback."""
    command = [sys.executable, "-m", "smelt.cli.main", "methods"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while library not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, ""), err
    assert err.startswith("smelt: stopped") and err.count("\n") == 1, err
