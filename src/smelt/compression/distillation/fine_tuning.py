"""Fine-tuning inside a pruning method: its settings, their checks, and the run of the trainer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from smelt.compression.base import MethodContext, one_of, within
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.distillation.losses import LossTerm
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.teachers import SOURCE
from smelt.compression.distillation.training_run import run_training, share_of_batch
from smelt.errors import RecipeError
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.train.trainer.config import (
    CheckpointConfig,
    EvaluateConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from smelt.train.trainer.tasks import TrainingTask

VALIDATION = 0.05  # fraction of the samples, the last ones


class FineTuning(Protocol):
    """The settings of a method that trains the weights it leaves."""

    @property
    def name(self) -> str: ...
    @property
    def losses(self) -> tuple[LossTerm, ...]: ...
    @property
    def epochs(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def schedule(self) -> ScheduleConfig: ...
    @property
    def precision(self) -> str: ...
    @property
    def max_grad_norm(self) -> float | None: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def select(self) -> str: ...


def check_fine_tuning(method: FineTuning) -> None:
    """Check the settings; 0 epochs are no training."""
    within(method.name, "epochs", method.epochs, 0, 1e6)
    within(method.name, "batch_size", method.batch_size, 1, 1_000_000)
    within(method.name, "checkpoint_every", method.checkpoint_every, 1, 1_000_000_000)
    one_of(method.name, "precision", method.precision, ("off", "bf16"))
    one_of(method.name, "select", method.select, ("best", "last"))


def check_logit_losses(name: str, losses: Sequence[LossTerm], teacher: str | None) -> None:
    """Check the losses of a method that compares logits only, with the model before the step as its one teacher."""
    if not losses:
        raise RecipeError(f"{name} needs at least one term of the loss, such as `losses: [{{loss: labels}}]`.")
    if teacher not in (None, SOURCE):
        raise RecipeError(f"the teacher of {name} is the model before this step; give `teacher: source`.")
    if any(term.intermediates for term in losses):
        raise RecipeError(f"{name} compares logits only; remove losses of intermediate outputs.")
    without_teacher = next((term.name for term in losses if term.needs_teacher and teacher is None), None)
    if without_teacher is not None:
        raise RecipeError(f"{name}: the loss {without_teacher} needs a teacher; give `teacher: source`.")


def fine_tuning_to_json(method: FineTuning) -> Mapping[str, Any]:
    """Return the settings that consist of several values, as in a recipe."""
    optimizer, schedule = dataclasses.asdict(method.optimizer), dataclasses.asdict(method.schedule)
    return {"losses": [term.to_json() for term in method.losses], "optimizer": optimizer, "schedule": schedule}


def fine_tuning_memory(method: FineTuning, anatomy: Anatomy, seq_len: int, *, teacher: bool) -> int:
    """Return the bytes of weights and gradients in float32, optimizer states, activations and the teacher."""
    trained = 4 * sum(parameter.numel() for parameter in anatomy.network.parameters())
    states = 2 if method.optimizer.name == "adamw" else 1
    return trained * (2 + states + teacher) + gradient_bytes(anatomy, method.batch_size, seq_len)


def fine_tune(
    method: FineTuning, model: Model, student: Student, samples: tuple[Samples, Samples], context: MethodContext,
    folder: Path, device: torch.device, *, stage: str = "training", epochs: float | None = None,
    select: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train the student on the first samples, evaluate on the second; leave the network in evaluation mode.

    Return facts about the training. A `stage` has its own progress and may have other epochs and selection.
    """
    train, validation = samples
    has_accuracy = model.task == "images" or (model.task == "classification" and model.network.config.num_labels > 1)
    task = TrainingTask(
        student, train, validation, has_accuracy, saves_model=False, graph_state=student.graph_state
    )  # fmt: skip
    facts = run_training(
        task, lambda: _train_config(method, model, len(train), method.epochs if epochs is None else epochs, context,
        device), folder / stage, device, name=f"{method.name}: {stage}", select=select or method.select,
        progress=context.progress,
    )  # fmt: skip
    model.network.eval()
    return facts


def _train_config(
    method: FineTuning, model: Model, samples: int, epochs: float, context: MethodContext, device: torch.device
) -> TrainConfig:
    return TrainConfig(
        model=model.source or "model", task="images" if model.task == "images" else "language",
        batch_size=share_of_batch(method.name, method.batch_size),
        steps=max(math.ceil(epochs * samples / method.batch_size), 1), seed=context.seed,
        precision=method.precision, max_grad_norm=method.max_grad_norm, optimizer=method.optimizer,
        schedule=method.schedule, gradients="none", device=device.type,
        evaluate=EvaluateConfig(every=method.checkpoint_every, samples=1_000_000),
        checkpoint=CheckpointConfig(every=method.checkpoint_every),
    )  # fmt: skip
