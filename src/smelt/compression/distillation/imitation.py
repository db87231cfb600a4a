"""Imitation learning of quantized policies: the expert's actions as labels, the float policy as the teacher."""

from __future__ import annotations

from dataclasses import dataclass, field

from smelt.compression.distillation.losses import Labels, LossTerm, Qbc
from smelt.compression.distillation.network_training import SOURCE
from smelt.compression.distillation.quantizers import ActivationQuantizer, WeightQuantizer
from smelt.compression.distillation.quantizers.lsq import Lsq, LsqActivations
from smelt.compression.distillation.teachers import DenseTeacher, DistilledTraining
from smelt.errors import ModelError, RecipeError
from smelt.models.model import Model


@dataclass(frozen=True)
class ImitationLearning(DistilledTraining):
    """Train a fake-quantized policy on demonstrations: 4 bits for weights and activations, with learned scales."""

    weights: WeightQuantizer = field(default_factory=lambda: Lsq("int4/row"))
    inputs: ActivationQuantizer | None = field(default_factory=LsqActivations)
    losses: tuple[LossTerm, ...] = (Labels(), Qbc())
    teacher: str | None = SOURCE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_logits is not None:
            raise RecipeError(f"{self.name} compares all outputs of the teacher; remove `cache_logits`.")

    def _dense_teacher(self, model: Model, name: str) -> DenseTeacher:
        teacher = super()._dense_teacher(model, name)
        for field_name in ("observation_size", "action_size", "action_space"):
            theirs, ours = (getattr(each.config, field_name, None) for each in (teacher.network, model.network))
            if theirs != ours:
                raise ModelError(
                    f"the teacher {name} has {field_name} {theirs} and the student {ours}; a teacher needs the same "
                    "observations and actions."
                )
        return teacher
