"""The run of the trainer inside a step: its process group, whether it resumes, and its best checkpoint."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

from smelt.errors import SmeltError
from smelt.files import write_atomically
from smelt.train.gradients.comm import Comm
from smelt.train.trainer import checkpoint
from smelt.train.trainer.distributed import init_distributed
from smelt.train.trainer.run_folder import RunFolder
from smelt.train.trainer.trainer import Trainer


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
    """Return whether there is an unfinished training run; refuse one of another number of workers."""
    exists = bool(comm.all_gather(torch.tensor([folder.exists()]), "agreement").all())
    before = RunFolder(folder).read_metadata()["world_size"] if exists else comm.world_size
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
