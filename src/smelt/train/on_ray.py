"""`python -m smelt.train.on_ray CONFIG.yaml --workers 4`: the same run, its workers started by Ray Train.

Ray starts the workers, on one machine or many, joins them into torch's process group and starts them again when one has
died; the loop is that of torchrun. The Ray that is started here leaves neither process nor file.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from smelt.errors import ConfigError, ResourceError, SmeltError
from smelt.ray_start import join_cluster, set_before, start_alone, take_signals_back
from smelt.train.trainer import checkpoint
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.distributed import LostWorkerError, backend_for, print_error
from smelt.train.trainer.entrypoint import BEFORE, build_parser, end, exit_code_of, run_folder_path, work
from smelt.train.trainer.run_folder import RunFolder, format_log_entry

_ALWAYS = {"RAY_TRAIN_METRICS_ENABLED": "0"}
_HERE = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}  # of machines that a cloud takes back
_LOOK_SECONDS = 5.0  # between two words about a run


def main(words: list[str] | None = None) -> None:
    given = _arguments_of(words)
    out = run_folder_path(given.config, given.out)
    options = {key: value for key, value in vars(given).items() if key not in ("config", "debug")}
    try:
        code = exit_code_of(lambda: _run(given.config, options), given.debug)
    except (KeyboardInterrupt, SystemExit) as stop:  # the latter is what Ray makes of SIGTERM
        print_error(f"stopped; {_way_out(out)}")
        code = 128 + (signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)
    end(code)


def run(
    config: Path,
    *,
    workers: int,
    gradients: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    resplit: bool = False,
    gpu: bool = False,
    restarts: int = 0,
    address: str | None = None,
) -> Path:
    """Train to the last step on Ray; the folder of the run, which all workers must see.

    A Ray that this process has joined already is used as it is; else one is started here, or joined at `address`.
    """
    told = TrainConfig.load(config, gradients)
    _require(told, workers, restarts, gpu)
    folder = RunFolder(run_folder_path(config, out).absolute())
    folder.check_usable(told, resume)
    task = {"config": told, "out": folder.path, "gpu": gpu, "resplit": resplit, "place": Path.cwd()}
    with _ray(address):
        _require_room(workers, gpu)
        _fit(task, workers, restarts)
    return folder.path


def _run(config: Path, options: dict[str, Any]) -> None:
    run(config, **options)


def _arguments_of(words: list[str] | None) -> argparse.Namespace:
    parser = build_parser("python -m smelt.train.on_ray", "Train a model; Ray Train starts the workers.")
    parser.add_argument("--workers", type=int, required=True, help="how many; each has a processor, or a GPU")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--restarts", type=int, default=0, help="how often to go on by itself when a worker has died")
    parser.add_argument("--address", help="a Ray cluster that runs: auto, or HOST:PORT; without it one is started here")
    return parser.parse_args(words)


def _require(config: TrainConfig, workers: int, restarts: int, gpu: bool) -> None:
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be at least 1.")
    if restarts < 0:
        raise ConfigError(f"restarts is {restarts}; it must not be negative.")
    if config.device == "cuda" and not gpu:
        raise ConfigError("device is cuda, and Ray gives workers a GPU only if told: give --gpu, or set device to cpu.")
    if config.device == "cpu" and gpu:
        raise ConfigError("device is cpu and --gpu was given; leave one of them out.")


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """Ray, for as long as it is needed; one that was there before stays."""
    os.environ.update(_ALWAYS if address else {**_ALWAYS, **_HERE})
    set_before(alone=address is None and not _joined())
    try:
        import ray.train.torch
    except ImportError as error:
        raise ResourceError("Ray is not installed here; `pip install 'smelt[ray]'`.") from error
    if ray.is_initialized():
        yield
        return
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="smelt-ray-", ignore_cleanup_errors=True) as folder:
        try:
            _connect(address, folder)
            yield
        finally:
            ray.shutdown()


def _joined() -> bool:
    """Whether this process has a Ray already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _connect(address: str | None, folder: str) -> None:
    if address is None:
        start_alone(folder)
    else:
        join_cluster(address)
    if threading.current_thread() is threading.main_thread():
        take_signals_back()


def _require_room(workers: int, gpu: bool) -> None:
    import ray

    there = ray.cluster_resources()
    for kind, wanted in (("CPU", True), ("GPU", gpu)):
        if wanted and workers > there.get(kind, 0):
            raise ResourceError(
                f"{workers} workers with a {kind} each were asked for; Ray has {there.get(kind, 0):g} of them. Ask for "
                "fewer workers, or give --address of a larger cluster."
            )


def _fit(task: dict[str, Any], workers: int, restarts: int) -> None:
    """Ray Train keeps files of its own beside the folder of the run: there all machines see them."""
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    config, out = task["config"], task["out"]
    own = out.with_name(f".{out.name}.ray")
    trainer = TorchTrainer(
        _work,
        train_loop_config=task,
        torch_config=TorchConfig(backend=backend_for(task["gpu"]), timeout_s=config.timeout),
        scaling_config=train.ScalingConfig(num_workers=workers, use_gpu=task["gpu"]),
        run_config=train.RunConfig(
            name="run",
            storage_path=str(own),
            failure_config=train.FailureConfig(max_failures=restarts),
            callbacks=[_refusals_end_it()],
            logging_config=train.LoggingConfig(log_level="CRITICAL"),
        ),
    )
    thread = ThreadPoolExecutor(1, thread_name_prefix="ray")  # of its own, else Ray takes Ctrl-C for itself
    try:
        _followed(thread.submit(trainer.fit), RunFolder(out), config.steps)
    except train.TrainingFailedError as error:
        raise _told(error, out) from error
    finally:
        thread.shutdown(wait=False)
        shutil.rmtree(own, ignore_errors=True)


def _followed(end: Future[Any], folder: RunFolder, steps: int) -> None:
    """Wait, and print_error how far the run has come: what workers print stays in Ray's logs, among much of its own."""
    told = folder.last_log_entry()
    while not end.done():
        wait([end], timeout=_LOOK_SECONDS)
        last = folder.last_log_entry()
        if last is not None and last != told:
            print(format_log_entry(last, steps), file=sys.stderr, flush=True)
        told = last
    end.result()


def _work(task: dict[str, Any]) -> None:
    """In a worker, whose process group Ray has made; the folder was looked at before the first start, so go on."""
    with suppress(OSError):  # another machine may lack it, and paths need not be relative
        os.chdir(task["place"])
    meet = _device if task["gpu"] else lambda: torch.device("cpu")
    work(task["config"], task["out"], meet, [lambda: BEFORE], resume=True, resplit=task["resplit"])


def _device() -> torch.device:
    from ray.train.torch import get_device

    device: torch.device = get_device()
    return device


def _refusals_end_it() -> Any:
    """Another start helps when a worker is gone, not when the run was refused."""
    from ray.train import UserCallback

    class Refusals(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            refusal = _refusal(worker_exceptions.values())
            if refusal is not None:
                raise refusal

    return Refusals()


def _refusal(failures: Iterable[Exception]) -> SmeltError | None:
    """What a worker was refused for; rather the cause than that another one has had it."""
    found = [each for each in failures if isinstance(each, SmeltError) and not isinstance(each, LostWorkerError)]
    return min(found, key=lambda each: "another worker" in str(each), default=None)


def _told(error: Exception, out: Path) -> Exception:
    """The sentence in what Ray says, or the error that is a bug."""
    failures = getattr(error, "worker_failures", None)
    if failures is None:  # of Ray's controller, which is also who was told of refusals
        failure = getattr(error, "controller_failure", error)
        said = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
        unknown = ResourceError(f"Ray could not start the workers, or keep them ({said}); {_way_out(out)}")
        return _refusal([failure]) or unknown
    for failure in failures.values():
        if not isinstance(failure, SmeltError) and type(failure).__module__.partition(".")[0] != "ray":
            return failure if isinstance(failure, Exception) else error
    return _refusal(failures.values()) or ResourceError(f"a worker has ended or does not answer; {_way_out(out)}")


def _way_out(out: Path) -> str:
    return checkpoint.resume_hint(RunFolder(out).checkpoints)


if __name__ == "__main__":
    from smelt.train.on_ray import main as started  # Ray sends functions by the name of their module

    started()
