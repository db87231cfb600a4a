"""`smelt qat`: training at low precision by one command, alone and on several workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Place, Smelt, llama_recipe

STEP = {
    "method": "tsld", "budget": None, "epochs": 5, "batch_size": 4, "checkpoint_every": 10,
    "optimizer": {"lr": 1e-3},
}  # fmt: skip


def qat_recipe(place: Place, **step: Any) -> str:
    content = llama_recipe(place)
    content["data"]["samples"] = 64
    content["steps"] = [{key: value for key, value in {**STEP, **step}.items() if value is not None}]
    return place.recipe("qat.yaml", content)


def facts(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "measurements.json").read_text())["steps"][0]["facts"]
    return result


def test_two_workers_train_like_one_and_resume_after_a_kill(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = [place / "llama", "-r", qat_recipe(place), "--no-speed"]
    done = smelt_here("qat", *arguments, "-o", str(tmp_path / "one"))
    assert done.code == 0 and "saved and verified" in done.out, done
    command = [sys.executable, "-P", "-m", "smelt.cli.main", "qat", *arguments, "-o", str(tmp_path / "two")]
    training = tmp_path / "two.partial" / "step-0-work" / "training"
    with subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 240
        while not (training / "checkpoints" / "step-10").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, check=True)
        os.kill(int(listed.stdout.split()[1]), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL and "another rank has ended" in errors, errors
    smelt_here("qat", *arguments, "-o", str(tmp_path / "two"), "--resume").refused("resume with --workers 2")
    resumed = subprocess.run([*command, "--resume", "--workers", "2"], capture_output=True, text=True, timeout=240)
    assert resumed.returncode == 0 and "saved and verified" in resumed.stdout, resumed
    one, two = facts(tmp_path / "one"), facts(tmp_path / "two")
    assert [step for step, _ in two["loss_curve"]] == [step for step, _ in one["loss_curve"]]
    losses = zip(one["loss_curve"], two["loss_curve"], strict=True)
    assert all(second[1] == pytest.approx(first[1], rel=1e-3) for first, second in losses)
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-3)


def test_what_has_nothing_to_train_or_to_share_is_refused(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    out = ["-o", str(tmp_path / "out")]
    smelt_here("qat", place / "llama", "--method", "rtn", *out).refused("rtn does not train the model")
    compress = ["compress", place / "llama", "--method", "rtn", "--workers", "2"]
    smelt_here(*compress, *out).refused("several workers have nothing to share; remove --workers")
    recipe = qat_recipe(place, gradients="exdina:density=0.1")
    smelt_here("qat", place / "llama", "-r", recipe, *out).refused("did you mean")
