"""TSLD: logit distillation in which tokens count by the teacher's uncertainty (Kim et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field

from smelt.compression.base import METHODS
from smelt.compression.distillation.losses import Labels, LossTerm, TokenScaledLogits
from smelt.compression.distillation.network_training import SOURCE
from smelt.compression.distillation.quantizers import WeightQuantizer
from smelt.compression.distillation.quantizers.twn import Twn
from smelt.compression.distillation.teachers import DistilledTraining
from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy


@METHODS.register("tsld", paper="Kim et al., 2023 (TSLD, arXiv 2308.06744)", needs=("calibration data",))
@dataclass(frozen=True)
class Tsld(DistilledTraining):
    """Use for ternary and 2-bit language models: the unquantized model teaches, confident tokens count less."""

    weights: WeightQuantizer = field(default_factory=Twn)
    losses: tuple[LossTerm, ...] = (Labels(), TokenScaledLogits())
    teacher: str | None = SOURCE

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if not anatomy.family.causal:
            raise ModelError("tsld weighs the tokens of a text by their predictability: it needs a language model.")
