"""Teacher Intervention: in the first steps, the student computes with the teacher's attention (Kim et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smelt.compression.base import METHODS, one_of, within
from smelt.compression.distillation.feature_losses import AttentionOutput, AttentionScore, HiddenStates
from smelt.compression.distillation.intermediates import INTERVENTIONS
from smelt.compression.distillation.losses import Logits, LossTerm
from smelt.compression.distillation.network_training import SOURCE
from smelt.compression.distillation.quantizers import ActivationQuantizer, WeightQuantizer
from smelt.compression.distillation.quantizers.minmax import MinMaxActivations
from smelt.compression.distillation.quantizers.twn import Twn
from smelt.compression.distillation.teachers import DistilledTraining
from smelt.errors import ModelError, RecipeError
from smelt.models.anatomy import Anatomy
from smelt.train.trainer.config import TrainConfig

GRADUAL, INVERTED, STOCHASTIC = "gradual", "inverted", "stochastic"
MODES = (GRADUAL, INVERTED, STOCHASTIC, *INTERVENTIONS)


@METHODS.register(
    "teacher-intervention",
    paper="Kim et al., 2023 (Teacher Intervention, arXiv 2302.11812)",
    needs=("calibration data",),
)
@dataclass(frozen=True)
class TeacherIntervention(DistilledTraining):
    """Use for ternary and 2-bit encoders with little data: layers first learn on the teacher's clean attention.

    In the first `intervention_steps` the student computes with the teacher's attention maps (`map`), maps times values
    (`context`) or projected attention (`output`), and the losses of a block's attention train that block only.
    `gradual` (TI-G) goes from output (1/6 of these steps) over context (1/6) to map; `inverted` from map over context
    to output, a third each; `stochastic` draws one for each step. One learning-rate schedule spans all steps; the
    published code begins a new one after the intervention.
    """

    weights: WeightQuantizer = field(default_factory=Twn)
    inputs: ActivationQuantizer | None = field(default_factory=lambda: MinMaxActivations(bits=8, signed=True))
    losses: tuple[LossTerm, ...] = (Logits(), HiddenStates(), AttentionScore(), AttentionOutput())
    teacher: str | None = SOURCE
    mode: str = GRADUAL  # gradual, inverted, stochastic, map, context or output
    intervention_steps: int = 60  # the first ones; the paper has 120 for CoLA

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "mode", self.mode, MODES)
        within(self.name, "intervention_steps", self.intervention_steps, 1, 1_000_000_000)

    @property
    def needs_teacher(self) -> bool:
        return True

    @property
    def intermediates(self) -> frozenset[str]:
        return super().intermediates | frozenset(INTERVENTIONS.values())

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if self.mode not in ("context", "output") and anatomy.family.attention and anatomy.family.attention.fused:
            raise ModelError(
                f"{anatomy.network.config.model_type} computes queries, keys and values in one layer, and an "
                "intervention with attention maps trains the values alone; use `mode: context` or `mode: output`."
            )

    def intervention(self, step: int) -> str | None:
        progress = step / self.intervention_steps
        if progress >= 1:
            return None
        if self.mode == GRADUAL:
            return "output" if progress < 1 / 6 else "context" if progress < 1 / 3 else "map"
        if self.mode == INVERTED:
            return "map" if progress < 1 / 3 else "context" if progress < 2 / 3 else "output"
        if self.mode == STOCHASTIC:
            return list(INTERVENTIONS)[np.random.default_rng(step).integers(len(INTERVENTIONS))]
        return self.mode

    def train_config(self, *args: Any) -> TrainConfig:
        config = super().train_config(*args)
        if config.steps <= self.intervention_steps:
            raise RecipeError(
                f"{self.name} trains for {config.steps} steps and the teacher intervenes in the first "
                f"{self.intervention_steps}; raise `epochs` or lower `intervention_steps`."
            )
        return config
