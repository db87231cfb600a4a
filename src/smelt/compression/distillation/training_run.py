"""The run of the trainer inside a step: its process group, whether it resumes, its best checkpoint, and its facts."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn

from smelt.errors import RecipeError, SmeltError
from smelt.files import write_atomically
from smelt.progress import Progress
from smelt.train.gradients.comm import Comm
from smelt.train.trainer import checkpoint
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.distributed import init_distributed
from smelt.train.trainer.run_folder import METADATA, RunFolder
from smelt.train.trainer.tasks import TrainingTask
from smelt.train.trainer.trainer import Trainer

CURVE_POINTS = 200


def run_training(
    task: TrainingTask, make_config: Callable[[], TrainConfig], folder: Path, device: torch.device, *, name: str,
    select: str, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Train the network of a task, or resume in its folder; leave the best or last weights in it and return facts.

    `make_config` is called in the process group. The folder is removed at the end.
    """
    with warnings.catch_warnings(), process_group(device):
        warnings.filterwarnings("ignore", "Grad strides do not match")  # of 1x1 convolutions in DDP: harmless
        config, comm = make_config(), Comm()
        resume = can_resume(folder, comm)
        trainer = Trainer(config, folder, device, resume=resume, resplit=False, task=task)
        best = BestCheckpoint(trainer)
        for entry in progress.track(trainer.steps(), name, total=config.steps - trainer.progress.step):
            best.update(entry)
        log = trainer.folder.read_log()
        if select == "best":
            best.load()
        comm.all_gather(torch.zeros(1), "agreement")  # every rank has read what is removed now
        if comm.rank == 0:
            (folder / METADATA).unlink()  # first, so that what a kill leaves is no run to resume
            shutil.rmtree(folder)
    losses: list[float] = [entry["loss"] for entry in log]
    evaluations = {entry["step"]: entry["evaluation"] for entry in log if "evaluation" in entry}
    selected = best.step if select == "best" else config.steps
    return {
        "steps": config.steps,
        "selected_step": selected,
        "final_loss": sum(losses[-20:]) / len(losses[-20:]),
        "loss_curve": _thin(losses),
        **{f"{name}_curve": _thin([entry[name] for entry in log]) for name in task.log_values()},
        **{f"validation_{name}": value for name, value in evaluations[selected].items()},
    }


def share_of_batch(method: str, batch_size: int) -> int:
    """Return how many samples of a batch each worker trains on."""
    world_size = distributed.get_world_size()
    if batch_size % world_size:
        raise RecipeError(
            f"batch_size of {method} is {batch_size}, which {world_size} workers cannot share; make it a multiple of "
            f"{world_size}."
        )
    return batch_size // world_size


def remember_dtypes(network: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter and buffer, by name."""
    return {name: tensor.dtype for name, tensor in chain(network.named_parameters(), network.named_buffers())}


def restore_dtypes(network: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Cast what is left of a network back; buffers that transformers computes in float32 stay in it."""
    for name, tensor in chain(network.named_parameters(), network.named_buffers()):
        if name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Train with the ranks that exist; if there is no process group, in one of this process alone."""
    if distributed.is_initialized():
        yield
        return
    init_distributed(device.type, timeout=60.0)
    try:
        yield
    finally:
        distributed.destroy_process_group()


class BestCheckpoint:
    """Keeps the weights of the checkpoint that does best on held-out samples, also when a run is resumed."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._folder = trainer, trainer.folder.path / "best"
        evaluated = [entry for entry in trainer.folder.read_log() if "evaluation" in entry]
        self.step, self._score = 0, -math.inf
        for entry in evaluated:
            self.update(entry, link=entry["step"] == trainer.progress.step)  # killed before it was kept

    def update(self, entry: dict[str, Any], *, link: bool = True) -> None:
        """Keep the checkpoint of a step if it was evaluated and none before was better."""
        evaluation = entry.get("evaluation")
        if evaluation is None:
            return
        score = evaluation.get("accuracy", -evaluation["loss"])
        if not score >= self._score:
            return
        self.step, self._score = entry["step"], score
        if link and self._trainer.comm.rank == 0:
            kept = self._trainer.folder.checkpoints / f"step-{self.step}" / checkpoint.MODEL
            write_atomically(self._folder / checkpoint.MODEL, partial(_link_or_copy, kept))

    def load(self) -> None:
        """Load the kept weights into the network of rank 0."""
        if self.step != self._trainer.progress.step and self._trainer.comm.rank == 0:
            checkpoint.load_model(self._trainer.task.network, self._folder)


def can_resume(folder: Path, comm: Comm) -> bool:
    """Return whether there is an unfinished training run; refuse one of another number of workers.

    What a run left that was killed before its first record or while it was removed is deleted.
    """
    run = RunFolder(folder)
    if comm.rank == 0 and not run.exists():
        shutil.rmtree(folder, ignore_errors=True)
    exists = bool(comm.all_gather(torch.tensor([run.exists()]), "agreement").all())
    before = run.read_metadata()["world_size"] if exists else comm.world_size
    if before != comm.world_size:
        raise SmeltError(
            f"the unfinished training in {folder} ran on {before} workers; resume with --workers {before}."
        )
    return exists


def _link_or_copy(source: Path, target: Path) -> None:
    """Give a file that never changes another name."""
    try:
        os.link(source, target)
    except OSError:  # not on every file system
        shutil.copyfile(source, target)


def _thin(values: list[float]) -> list[list[float]]:
    """Return at most `CURVE_POINTS` pairs of step and mean value."""
    size = max(math.ceil(len(values) / CURVE_POINTS), 1)
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    return [[min((index + 1) * size, len(values)), sum(part) / len(part)] for index, part in enumerate(parts)]
