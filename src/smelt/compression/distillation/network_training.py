"""Base classes of methods that train the network: the settings of the training, their checks, its run and its memory.

A method adds what is special about its training: other defaults, terms of the loss, or keys of the trainer's
configuration.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from smelt.compression.base import (
    Batch,
    CalibrationSize,
    Method,
    MethodContext,
    ResourceEstimate,
    one_of,
    within,
)
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.distillation.losses import Labels, LossTerm
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.training_run import run_training, share_of_batch
from smelt.errors import DataError, RecipeError
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

SOURCE = "source"  # as a teacher: the model before the step
VALIDATION = 0.05  # fraction of the samples, the last ones


@dataclass(frozen=True, kw_only=True)
class NetworkTraining(Method):
    """Train the network, as the whole method or as a part of it."""

    losses: tuple[LossTerm, ...] = (Labels(),)  # terms that are added up
    epochs: float = 1.0  # over the samples of the recipe's data
    batch_size: int = 32  # samples per step
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: str = "off"  # or bf16: of forward and backward
    max_grad_norm: float | None = 1.0  # gradients of a larger norm are scaled down to it; null: never
    checkpoint_every: int = 500  # steps; each checkpoint is evaluated on samples that are held out

    trains: ClassVar[bool] = True
    min_epochs: ClassVar[float] = 1e-6  # 0: the method can do without training

    def __post_init__(self) -> None:
        within(self.name, "epochs", self.epochs, self.min_epochs, 1e6)
        within(self.name, "batch_size", self.batch_size, 1, 1_000_000)
        within(self.name, "checkpoint_every", self.checkpoint_every, 1, 1_000_000_000)
        one_of(self.name, "precision", self.precision, ("off", "bf16"))
        one_of(self.name, "select", self.select, ("best", "last"))

    @property
    def select(self) -> str:
        """The checkpoint whose weights stay, best or last: a parameter of most methods."""
        return "last"

    @property
    def samples_per_step(self) -> int:
        return self.batch_size

    @property
    def training_epochs(self) -> float:
        """The epochs of all training, for the plan."""
        return self.epochs

    def steps(self, samples: int, epochs: float | None = None) -> int:
        """Return the number of steps of a training on so many samples, by default for the epochs of the method."""
        return max(math.ceil((self.epochs if epochs is None else epochs) * samples / self.samples_per_step), 1)

    def check_losses(self, example: str = "labels") -> None:
        if not self.losses:
            raise RecipeError(
                f"{self.name} needs at least one term of the loss, such as `losses: [{{loss: {example}}}]`."
            )

    def check_labels(self, batches: Sequence[Batch]) -> None:
        """Raise if the data has no labels to train on."""
        if not batches or any("labels" not in batch for batch in batches):
            raise DataError(f"{self.name} trains on labels, and the data has none; name labeled data.")

    def to_json(self) -> dict[str, Any]:
        optimizer, schedule = dataclasses.asdict(self.optimizer), dataclasses.asdict(self.schedule)
        losses = [term.to_json() for term in self.losses]
        return {**super().to_json(), "losses": losses, "optimizer": optimizer, "schedule": schedule}

    def training_memory(
        self, anatomy: Anatomy, seq_len: int, *, teacher: bool, dtype: torch.dtype = torch.float32
    ) -> int:
        """Return the bytes of weights, gradients and teacher in float32, optimizer states, and activations."""
        trained = 4 * sum(parameter.numel() for parameter in anatomy.network.parameters())
        states = 2 if self.optimizer.name == "adamw" else 1
        return trained * (2 + states + teacher) + gradient_bytes(anatomy, self.batch_size, seq_len, dtype=dtype)

    def train_config(
        self, samples: int, epochs: float | None, model: Model, context: MethodContext, device: torch.device
    ) -> TrainConfig:
        """Return the configuration of a run on so many samples; its ranks share each batch."""
        return TrainConfig(
            model=model.source or "model", task="images" if model.task == "images" else "language",
            batch_size=share_of_batch(self.name, self.batch_size),
            steps=self.steps(samples, epochs), seed=context.seed, precision=self.precision,
            max_grad_norm=self.max_grad_norm, optimizer=self.optimizer, schedule=self.schedule, gradients="none",
            device=device.type,
            evaluate=EvaluateConfig(every=self.checkpoint_every, samples=1_000_000),
            checkpoint=CheckpointConfig(every=self.checkpoint_every),
        )  # fmt: skip

    def train(
        self, task: TrainingTask, model: Model, context: MethodContext, device: torch.device, *,
        stage: str | None = None, epochs: float | None = None, select: str | None = None, **changes: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Train the network of a task, or resume an interrupted training; return facts about it.

        A `stage` of several has its own progress, and may have other epochs, another selection, and `changes` of the
        trainer's configuration.
        """

        def make_config() -> TrainConfig:
            return dataclasses.replace(self.train_config(len(task.train), epochs, model, context, device), **changes)

        return run_training(
            task, make_config, training_folder(context) / (stage or "training"), device,
            name=self.name if stage is None else f"{self.name}: {stage}", select=select or self.select,
            progress=context.progress,
        )  # fmt: skip

    def fine_tune(
        self, student: Student, samples: tuple[Samples, Samples], model: Model, context: MethodContext,
        device: torch.device, *, stage: str = "training", epochs: float | None = None, select: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Train a student on the first samples, evaluate on the second; leave the network in evaluation mode."""
        train, validation = samples
        has_accuracy = model.task == "images" or (
            model.task == "classification" and model.network.config.num_labels > 1
        )
        task = TrainingTask(
            student, train, validation, has_accuracy, saves_model=False, graph_state=student.graph_state
        )  # fmt: skip
        facts = self.train(task, model, context, device, stage=stage, epochs=epochs, select=select)
        model.network.eval()
        return facts


@dataclass(frozen=True, kw_only=True)
class LogitDistillation(NetworkTraining):
    """Train the network, if wanted with the logits of the model before the step as targets."""

    teacher: str | None = None  # source: the model before this step, for losses such as logits; null: none

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_losses()
        if self.teacher not in (None, SOURCE):
            raise RecipeError(f"the teacher of {self.name} is the model before this step; give `teacher: source`.")
        if any(term.intermediates for term in self.losses):
            raise RecipeError(f"{self.name} compares logits only; remove losses of intermediate outputs.")
        without_teacher = next((term.name for term in self.losses if term.needs_teacher and self.teacher is None), None)
        if without_teacher is not None:
            raise RecipeError(f"{self.name}: the loss {without_teacher} needs a teacher; give `teacher: source`.")

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        memory = self.training_memory(anatomy, size.seq_len, teacher=self.teacher is not None)
        return ResourceEstimate(passes=self.training_epochs * (4 if self.teacher else 3), memory=memory)


def training_folder(context: MethodContext) -> Path:
    """Return where a training keeps what it needs to be resumed."""
    return context.checkpoint.folder or context.folder or Path(tempfile.mkdtemp())
