"""The command under torchrun: a killed worker, and resuming after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from smelt.train.trainer.run_folder import RunFolder
from tests.train.trainer.runs import language, run_command, write_config

START = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "smelt.train"]
PATIENCE = 300  # seconds; a loaded machine is slow


def children(process: int) -> list[int]:
    results = []
    for task in Path(f"/proc/{process}/task").iterdir():
        results += [int(word) for word in (task / "children").read_text().split()]
    return results


def worker_of(torchrun: int, rank: int) -> int:
    """Return the worker's process ID from its torchrun environment."""
    for process in children(torchrun):
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in variables:
            return process
    raise AssertionError("the worker is not there")


def test_a_killed_worker_fails_the_run_with_one_sentence_and_resume_continues(tmp_path: Path) -> None:
    out, folder = tmp_path / "run", RunFolder(tmp_path / "run")
    content = language(
        tmp_path,
        steps=100_000,
        evaluate={"samples": 4},
        checkpoint={"every": 5, "keep": 2},
        schedule={"name": "constant"},
        timeout=1000.0,  # longer than this test waits: the other rank must notice by itself
    )
    call = [*START, str(write_config(tmp_path / "long.yaml", content)), "--out", str(out)]
    with subprocess.Popen(call, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
        until = time.monotonic() + PATIENCE
        while not (folder.checkpoints / "step-10").is_dir():
            assert run.poll() is None
            assert time.monotonic() < until, "the run does not come so far"
            time.sleep(0.02)
        os.kill(worker_of(run.pid, 1), signal.SIGKILL)
        _, stderr = run.communicate(timeout=PATIENCE)
    assert run.returncode != 0
    sentences = [line for line in stderr.splitlines() if line.startswith("smelt: ")]
    assert len(sentences) == 1, stderr  # the other rank's error, without a traceback
    assert "another rank has ended or does not answer" in sentences[0]
    assert "--resume continues from step-" in sentences[0]
    assert "this is a bug" not in stderr

    before = {line["step"]: line["loss"] for line in folder.read_log()}
    last_step = max(int(place.name.removeprefix("step-")) for place in folder.checkpoints.glob("step-*"))
    shorter = write_config(tmp_path / "long.yaml", {**content, "steps": last_step + 3})
    (folder.checkpoints / ".step-99.partial").mkdir()  # as if killed while writing
    for code, stderr in run_command(2, [str(shorter), "--out", str(out), "--resume"], tmp_path):
        assert code == 0, stderr
    lines = folder.read_log()
    assert [line["step"] for line in lines] == list(range(1, last_step + 4))
    assert {line["step"]: line["loss"] for line in lines[:last_step]} == {
        step: before[step] for step in range(1, last_step + 1)
    }
    assert not list(folder.checkpoints.glob(".*"))  # the partial checkpoint is gone


def test_without_torchrun_it_is_one_rank_and_errors_are_an_exit_code_and_one_sentence(tmp_path: Path) -> None:
    content = language(tmp_path, steps=2)
    arguments = [str(write_config(tmp_path / "one.yaml", content)), "--out", str(tmp_path / "run")]
    ((code, stderr),) = run_command(1, [*arguments, "--gradients", "auto", "--resume"], tmp_path)
    assert code == 0 and "step 2 of 2: loss" in stderr
    assert "run/checkpoints; starting from the first step" in stderr  # there was nothing to resume
    assert RunFolder(tmp_path / "run").read_metadata()["config"]["gradients"] == {"method": "auto"}
    ((code, stderr),) = run_command(1, arguments, tmp_path)
    assert (code, stderr.count("\n")) == (2, 1) and "smelt: " in stderr and "give --resume to continue" in stderr
    wrong = write_config(tmp_path / "wrong.yaml", {"modle": "x", "model": "y"})
    ((code, stderr),) = run_command(1, [str(wrong), "--out", str(tmp_path / "wrong")], tmp_path)
    assert code == 2 and not (tmp_path / "wrong").exists()
    assert stderr == f"smelt: {wrong}: the configuration has no key 'modle'; did you mean 'model'?\n"
