"""`python -m smelt.train.on_ray CONFIG.yaml --workers 4`: the same run, its ranks started by Ray Train.

Ray starts the workers, on one machine or many, joins them into torch's process group and restarts them when one has
died; the trainer is that of torchrun. A Ray that is started here leaves neither process nor file behind.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smelt.errors import ConfigError, ResourceError, SmeltError, install_command
from smelt.logs import show_logs
from smelt.ray_start import join_cluster, restore_signal_handlers, set_ray_environment, start_local_ray
from smelt.train.trainer import checkpoint
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.distributed import LostWorkerError, backend_for, print_error
from smelt.train.trainer.entrypoint import (
    ResumeHint,
    build_parser,
    exit_process,
    run_and_report,
    run_folder_path,
    run_worker,
)
from smelt.train.trainer.run_folder import RunFolder, format_log_entry

logger = logging.getLogger(__name__)
_RAY_ENV = {"RAY_TRAIN_METRICS_ENABLED": "0"}
_LOCAL_RAY_ENV = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}  # for machines that a cloud takes back
_POLL_SECONDS = 5.0  # between two reads of a run's log


@dataclass(frozen=True)
class _WorkerArgs:
    """What Ray sends to each worker."""

    config: TrainConfig
    out: Path
    gpu: bool
    resplit: bool
    working_dir: Path


def main(argv: list[str] | None = None) -> None:
    args = _parse_args(argv)
    show_logs()
    out = run_folder_path(args.config, args.out)
    options = {key: value for key, value in vars(args).items() if key not in ("config", "debug")}
    try:
        code = run_and_report(lambda: _run(args.config, options), args.debug)
    except (KeyboardInterrupt, SystemExit) as stop:  # Ray turns SIGTERM into the latter
        print_error(f"stopped; {_resume_hint(out)}")
        code = 128 + (signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)
    exit_process(code)


def run(
    config: Path,
    *,
    workers: int,
    gradients: str | None = None,
    precision: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    resplit: bool = False,
    gpu: bool = False,
    restarts: int = 0,
    address: str | None = None,
) -> Path:
    """Train to the last step on Ray, and return the folder of the run, which all workers must see.

    A Ray that this process has joined already is used; else one is started here, or joined at `address`.
    """
    train_config = TrainConfig.load(config, gradients, precision)
    _check_options(train_config, workers, restarts, gpu)
    folder = RunFolder(run_folder_path(config, out).absolute())
    folder.check_usable(train_config, resume)
    worker_args = _WorkerArgs(train_config, folder.path, gpu, resplit, Path.cwd())
    with _ray_session(address):
        _check_resources(workers, gpu)
        _fit(worker_args, workers, restarts)
    return folder.path


def _run(config: Path, options: dict[str, Any]) -> None:
    run(config, **options)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = build_parser("python -m smelt.train.on_ray", "Train a model; Ray Train starts the workers.")
    parser.add_argument("--workers", type=int, required=True, help="number of workers; each gets a CPU, or a GPU")
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--restarts", type=int, default=0, help="how often to resume when a worker has died")
    parser.add_argument("--address", help="a running Ray cluster: auto, or HOST:PORT (default: start one here)")
    return parser.parse_args(argv)


def _check_options(config: TrainConfig, workers: int, restarts: int, gpu: bool) -> None:
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be at least 1.")
    if restarts < 0:
        raise ConfigError(f"restarts is {restarts}; it must not be negative.")
    if config.device == "cuda" and not gpu:
        raise ConfigError(
            "device is cuda, and Ray gives workers a GPU only with --gpu: give --gpu, or set device to cpu."
        )
    if config.device == "cpu" and gpu:
        raise ConfigError("device is cpu and --gpu was given; leave one of them out.")


@contextmanager
def _ray_session(address: str | None) -> Iterator[None]:
    """Provide Ray; one that was there before is left running."""
    os.environ.update(_RAY_ENV if address else {**_RAY_ENV, **_LOCAL_RAY_ENV})
    set_ray_environment(local=address is None and not _is_joined())
    try:
        import ray.train.torch
    except ImportError as error:
        raise ResourceError(f"Ray is not installed here; `{install_command('ray')}`.") from error
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


def _is_joined() -> bool:
    """Return whether this process is connected to a Ray already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _connect(address: str | None, folder: str) -> None:
    if address is None:
        start_local_ray(folder)
    else:
        join_cluster(address)
    if threading.current_thread() is threading.main_thread():
        restore_signal_handlers()


def _check_resources(workers: int, gpu: bool) -> None:
    import ray

    available = ray.cluster_resources()
    for resource in ("CPU", "GPU") if gpu else ("CPU",):
        if workers > available.get(resource, 0):
            raise ResourceError(
                f"{workers} workers need one {resource} each; Ray has {available.get(resource, 0):g} of them. Ask for "
                "fewer workers, or give --address of a larger cluster."
            )


def _fit(args: _WorkerArgs, workers: int, restarts: int) -> None:
    """Train; Ray Train keeps its own files beside the folder of the run, where all machines see them."""
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    ray_folder = args.out.with_name(f".{args.out.name}.ray")
    trainer = TorchTrainer(
        _train_on_worker,
        train_loop_config={"args": args},
        torch_config=TorchConfig(backend=backend_for(args.gpu), timeout_s=args.config.timeout),
        scaling_config=train.ScalingConfig(num_workers=workers, use_gpu=args.gpu),
        run_config=train.RunConfig(
            name="run",
            storage_path=str(ray_folder),
            failure_config=train.FailureConfig(max_failures=restarts),
            callbacks=[_stop_on_refusal()],
            logging_config=train.LoggingConfig(log_level="CRITICAL"),
        ),
    )
    thread = ThreadPoolExecutor(1, thread_name_prefix="ray")  # in the main thread Ray would take over Ctrl-C
    try:
        _log_progress(thread.submit(trainer.fit), RunFolder(args.out), args.config.steps)
    except train.TrainingFailedError as error:
        raise _find_cause(error, args.out) from error
    finally:
        thread.shutdown(wait=False)
        shutil.rmtree(ray_folder, ignore_errors=True)


def _log_progress(result: Future[Any], folder: RunFolder, steps: int) -> None:
    """Wait, and log progress from the run's log file: what workers log goes to Ray's logs."""
    logged = folder.last_log_entry()
    while not result.done():
        wait([result], timeout=_POLL_SECONDS)
        entry = folder.last_log_entry()
        if entry is not None and entry != logged:
            logger.info(format_log_entry(entry, steps))
        logged = entry
    result.result()


def _train_on_worker(loop_config: dict[str, _WorkerArgs]) -> None:
    """Train in a worker whose process group Ray has made; resume, as the folder was checked before the first start."""
    args = loop_config["args"]
    with suppress(OSError):  # another machine may lack it, and paths need not be relative
        os.chdir(args.working_dir)
    init = _ray_device if args.gpu else lambda: torch.device("cpu")
    run_worker(args.config, args.out, init, ResumeHint(), resume=True, resplit=args.resplit)


def _ray_device() -> torch.device:
    from ray.train.torch import get_device

    device: torch.device = get_device()
    return device


def _stop_on_refusal() -> Any:
    """Return a callback that ends the run when it was refused: a restart only helps when a worker has ended."""
    from ray.train import UserCallback

    class StopOnRefusal(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            refusal = _refusal(worker_exceptions.values())
            if refusal is not None:
                raise refusal

    return StopOnRefusal()


def _refusal(failures: Iterable[Exception]) -> SmeltError | None:
    """Return why the run was refused; prefer the cause to messages that another rank had it."""
    refusals = [error for error in failures if isinstance(error, SmeltError) and not isinstance(error, LostWorkerError)]
    return min(refusals, key=lambda error: "another rank" in str(error), default=None)


def _find_cause(error: Exception, out: Path) -> Exception:
    """Return the Smelt error inside a Ray error, or the exception that is a bug."""
    failures = getattr(error, "worker_failures", None)
    if failures is None:  # an error of Ray's controller, which also gets the refusals
        failure = getattr(error, "controller_failure", error)
        lines = str(failure).strip().splitlines() or [""]
        reason = f"{type(failure).__name__}: {lines[0]}"
        unknown = ResourceError(
            f"Ray could not start the workers, or keep them running ({reason}); {_resume_hint(out)}"
        )
        return _refusal([failure]) or unknown
    for failure in failures.values():
        if not isinstance(failure, SmeltError) and type(failure).__module__.partition(".")[0] != "ray":
            return failure if isinstance(failure, Exception) else error
    return _refusal(failures.values()) or ResourceError(f"a worker has ended or does not answer; {_resume_hint(out)}")


def _resume_hint(out: Path) -> str:
    return checkpoint.resume_hint(RunFolder(out).checkpoints)


if __name__ == "__main__":
    from smelt.train.on_ray import main as imported_main  # Ray sends functions by the name of their module

    imported_main()
