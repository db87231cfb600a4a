"""Training on Ray from the command line: equal to torchrun, and recovering from a lost worker.

Ray needs half a minute to start two workers, so each run checks several things.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import smelt
from smelt.errors import DataError, ResourceError
from smelt.train import on_ray
from smelt.train.on_ray import _find_cause
from smelt.train.trainer.distributed import LostWorkerError
from smelt.train.trainer.run_folder import RunFolder
from tests.train.trainer.runs import language, run_command, run_training, write_config

pytest.importorskip("ray", reason="needs Ray Train, which is large: pip install 'smeltml[ray]'")
psutil = pytest.importorskip("psutil", reason="shows which processes Ray has started")
pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="Ray gives each of two workers a processor")

COMMAND = [sys.executable, "-m", "smelt.train.on_ray"]
PATIENCE = 200  # seconds
Run = subprocess.Popen[str]
Start = Callable[..., Run]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the command in its config's folder; terminate what still runs after the test, with its Ray."""
    runs: list[Run] = []

    def starts(config: Path, *words: str, workers: int = 2) -> Run:
        mine = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "OMP_"))}
        environment = {**mine, "HOME": str(config.parent), "PYTHONPATH": str(Path(smelt.__file__).parents[1])}
        call, pipe = [*COMMAND, str(config), "--workers", str(workers), *words], subprocess.PIPE
        runs.append(subprocess.Popen(call, stderr=pipe, stdout=pipe, text=True, env=environment, cwd=config.parent))
        return runs[-1]

    yield starts
    for run in runs:
        run.terminate()
        run.communicate(timeout=20)


def ended(run: Run) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr."""
    output, stderr = run.communicate(timeout=PATIENCE)
    return run.returncode, output, stderr


def family(run: Run) -> list[Any]:
    return psutil.Process(run.pid).children(recursive=True)


def workers_of(run: Run) -> list[Any]:
    results = []
    for process in family(run):
        with suppress(psutil.Error):  # it has ended in the meantime
            results += [process] if process.cmdline()[:1] == ["ray::RayTrainWorker"] else []
    return results


def wait_for(place: Path, run: Run) -> None:
    until = time.monotonic() + PATIENCE
    while not place.exists():
        assert run.poll() is None, ended(run)
        assert time.monotonic() < until, "the run does not come so far"
        time.sleep(0.02)


def leftovers(folder: Path) -> list[Path]:
    """Return Ray's leftovers: results, its folder in the home directory, and temporary folders."""
    own = [*folder.glob(".*.ray"), *folder.glob("ray_results")]
    return own + list(Path(tempfile.gettempdir()).glob("smelt-ray-*"))


def weights(out: Path) -> dict[str, bytes]:
    tensors = load_file(RunFolder(out).model / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def losses(out: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in RunFolder(out).read_log()]


def test_two_ray_workers_match_two_torchrun_ranks_bit_for_bit(tmp_path: Path, start: Start) -> None:
    content = language(tmp_path)
    near = {**content, "data": {**content["data"], "train": "text.txt"}}  # relative; Ray changes the directory
    run = start(write_config(tmp_path / "small.yaml", near), "--out", "on-ray")
    wait_for(tmp_path / "on-ray" / "run.json", run)
    processes = family(run)
    environments = [worker.environ() for worker in workers_of(run)]
    code, _, stderr = ended(run)
    assert code == 0, stderr
    run_training(2, content, tmp_path / "plain")
    assert losses(tmp_path / "on-ray") == losses(tmp_path / "plain")
    assert weights(tmp_path / "on-ray") == weights(tmp_path / "plain")
    assert RunFolder(tmp_path / "on-ray").read_metadata()["world_size"] == 2
    assert "step 6 of 6: loss" in stderr and "Traceback" not in stderr

    assert len(environments) == 2
    for environment in environments:
        assert environment["RAY_AUTH_MODE"] == "token" and len(environment["RAY_AUTH_TOKEN"]) == 64
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_killed_worker_is_restarted_and_the_run_ends_with_the_same_weights(tmp_path: Path, start: Start) -> None:
    content = language(tmp_path, steps=120, evaluate={"samples": 4}, checkpoint={"every": 5, "keep": 2})
    config, out = write_config(tmp_path / "long.yaml", content), tmp_path / "run"
    run = start(config, "--out", "run", "--restarts", "1")
    wait_for(out / "checkpoints" / "step-10", run)
    first = workers_of(run)
    first[1].kill()
    restarted: set[Any] = set()
    while run.poll() is None and len(restarted) < 2:
        restarted |= {worker for worker in workers_of(run) if worker not in first}
        time.sleep(0.1)
    code, _, stderr = ended(run)
    assert code == 0, stderr
    assert len(restarted) == 2, "nobody was started again"
    run_training(2, content, tmp_path / "undisturbed")
    assert losses(out) == losses(tmp_path / "undisturbed")
    assert weights(out) == weights(tmp_path / "undisturbed")
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_without_restarts_a_killed_worker_fails_the_run_with_one_sentence(tmp_path: Path, start: Start) -> None:
    content = language(tmp_path, steps=100_000, schedule={"name": "constant"}, checkpoint={"every": 5, "keep": 2})
    config, out = write_config(tmp_path / "long.yaml", content), tmp_path / "run"
    run = start(config, "--out", "run")
    wait_for(out / "checkpoints" / "step-10", run)
    processes = family(run)
    workers_of(run)[1].kill()
    code, _, stderr = ended(run)
    sentences = [line for line in stderr.splitlines() if line.startswith("smelt: ")]
    assert code == 2 and len(sentences) == 1, stderr
    assert sentences[0].startswith("smelt: a worker has ended or does not answer; --resume continues from step-")
    assert "Traceback" not in stderr and "this is a bug" not in stderr
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_config_error_on_a_worker_is_one_sentence_and_not_retried(tmp_path: Path, start: Start) -> None:
    content = language(tmp_path)
    content["data"]["train"] = str(tmp_path / "missing.txt")
    run = start(write_config(tmp_path / "no_data.yaml", content), "--restarts", "99")
    code, _, stderr = ended(run)  # the wait is shorter than 99 starts
    assert (code, stderr.count("\n")) == (2, 1), stderr
    assert stderr.startswith("smelt: ") and "missing.txt" in stderr
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("failures", "kind", "sentence"),
    [
        (
            [LostWorkerError("x"), ResourceError("another rank could not."), DataError("a cause.")],
            DataError,
            "a cause.",
        ),
        ([LostWorkerError("another rank")], ResourceError, "a worker has ended or does not answer; --resume continues"),
        ([LostWorkerError("another rank"), KeyError("mine")], KeyError, "mine"),
    ],
)
def test_of_several_errors_the_cause_is_reported(
    failures: list[Exception], kind: type[Exception], sentence: str, tmp_path: Path
) -> None:
    from ray.train import WorkerGroupError

    message = _find_cause(WorkerGroupError("all of them", dict(enumerate(failures))), tmp_path)
    assert type(message) is kind and sentence in str(message)


def test_more_workers_than_cpus_are_refused_with_the_count(tmp_path: Path, start: Start) -> None:
    config = write_config(tmp_path / "small.yaml", language(tmp_path))
    code, output, stderr = ended(start(config, workers=1000))
    assert (code, output) == (2, "")
    assert stderr.startswith("smelt: 1000 workers need one CPU each; Ray has ")
    assert stderr.count("\n") == 1 and "Ask for fewer workers" in stderr
    assert not (tmp_path / "runs").exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("address", [None, "auto"])
def test_usage_reports_are_off_before_ray_starts_or_is_joined(address: str | None) -> None:
    """Ray turns usage reports off itself when it starts in-process, so its own workers do not show it."""
    code = (
        "import os; from smelt.train import on_ray\n"
        "on_ray._connect = lambda *_: print(os.environ['RAY_USAGE_STATS_ENABLED'])\n"
        f"with on_ray._ray_session({address!r}):\n"
        "    from ray._common.usage.usage_lib import usage_stats_enabled as enabled\n"
        "print(enabled())"
    )
    mine = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    result = subprocess.run([sys.executable, "-c", code], env=mine, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["0", "False"], result.stderr


REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    ({"modle": "x"}, [], "has no key 'modle'; did you mean 'model'?"),
    ({}, ["--workers", "0"], "workers is 0; it must be at least 1."),
    ({}, ["--restarts", "-1"], "restarts is -1; it must not be negative."),
    ({}, ["--gpu"], "device is cpu and --gpu was given; leave one of them out."),
    ({"device": "cuda"}, [], "give --gpu, or set device to cpu."),
    ({}, ["--out", "."], "is not empty and holds no run; give another --out."),
    ({}, ["--address", "127.0.0.1:9"], "there is no Ray cluster at 127.0.0.1:9 that this machine belongs to"),
]


def main_without_starting(words: list[str]) -> None:
    """Run the command with a Ray that fails if started."""
    on_ray.start_local_ray = None  # type: ignore[assignment]
    on_ray.main(words)


@pytest.mark.parametrize(("changes", "words", "sentence"), REFUSED)
def test_config_errors_are_reported_before_ray_starts(
    changes: dict[str, Any], words: list[str], sentence: str, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "wrong.yaml", {**language(tmp_path), **changes})
    ((code, stderr),) = run_command(1, [str(config), "--workers", "2", *words], tmp_path, main_without_starting)
    assert (code, stderr.count("\n")) == (2, 1), stderr
    assert stderr.startswith("smelt: ") and sentence in stderr
    assert not (tmp_path / "runs").exists()
