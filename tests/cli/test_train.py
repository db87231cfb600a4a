"""`smelt train --workers N`: local ranks that train, and the exit code of the one that failed first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from smelt.cli.workers import run_workers
from smelt.errors import ConfigError
from tests.cli.conftest import Smelt

CONFIG = """
task: language
model: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
        num_key_value_heads: 1, max_position_embeddings: 32, tie_word_embeddings: true}
data: {train: DATA, seq_len: 16}
batch_size: 2
steps: STEPS
optimizer: {name: sgd}
gradients: none
device: cpu
evaluate: {every: 2, samples: 4}
"""
SMELT = [sys.executable, "-m", "smelt.cli.main", "train"]


def written(folder: Path, steps: int) -> Path:
    (folder / "prose.txt").write_text("What is said once is soon forgotten; what is said twice is not. " * 200)
    (folder / "tiny.yaml").write_text(CONFIG.replace("DATA", str(folder / "prose.txt")).replace("STEPS", str(steps)))
    return folder / "tiny.yaml"


def test_two_workers_train(tmp_path: Path) -> None:
    command = [*SMELT, str(written(tmp_path, 4)), "--workers", "2", "-o", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert '"world_size": 2' in (tmp_path / "run" / "run.json").read_text()
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert again.returncode == 2  # the folder holds a run; both ranks say so, once
    assert again.stderr.count("smelt: ") == 1 and "--resume" in again.stderr, again.stderr


def test_a_baseline_is_trained_and_compared(tmp_path: Path) -> None:
    config = written(tmp_path, 3)
    command = [*SMELT, str(config), "--precision", "fp8", "--baseline", "bf16", "-o", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    for folder, precision in (("run", "fp8"), ("run-bf16", "bf16")):
        assert f'"precision": "{precision}"' in (tmp_path / folder / "run.json").read_text()
    page = (tmp_path / "run" / "comparison.html").read_text()
    assert "run-bf16" in page and "Loss against step" in page
    assert "GEMM FLOPs in FP8" in done.stdout and "% emulated" in done.stdout
    assert "FP8 is emulated" in done.stderr and "of the GEMM FLOPs with FP8 instructions" in done.stderr
    same = subprocess.run([*command[:-5], "fp8", "--baseline", "fp8"], capture_output=True, text=True, check=False)
    assert same.returncode == 2 and "the run is in fp8 already; give --baseline another precision" in same.stderr


@contextmanager
def long_run(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run of two workers that has made a step, and the process ids of its ranks."""
    command = [*SMELT, str(written(folder, 100_000)), "--workers", "2", "-o", str(folder / "run")]
    log, deadline = folder / "run" / "run.jsonl", time.monotonic() + 120
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (log.exists() and log.read_text()):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, check=True)
            yield process, [int(word) for word in listed.stdout.split()]
        finally:
            process.terminate()


def test_the_code_of_the_rank_that_failed_first_is_returned(tmp_path: Path) -> None:
    """Rank 1 is killed: its 137 is the cause, while rank 0 ends with 2 because it has lost a peer."""
    with long_run(tmp_path) as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "another rank has ended" in errors


@pytest.mark.slow  # three torch imports
def test_sigterm_stops_all_workers(tmp_path: Path) -> None:
    with long_run(tmp_path) as (process, ranks):
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 130
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def test_one_worker_cannot_measure_between_ranks() -> None:
    with pytest.raises(ConfigError, match="--workers 2 or more"):
        run_workers(["link"], 1)


def test_a_missing_configuration_is_one_sentence(smelt_here: Smelt, tmp_path: Path) -> None:
    smelt_here("shard-plan", str(tmp_path / "none.yaml")).refused("none.yaml")
