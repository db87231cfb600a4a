"""Fine-tuning in floating point: the training of quantization-aware methods without quantization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from smelt.compression.base import METHODS, Batch, MethodContext, UndecidedWidth
from smelt.compression.distillation.base import check_float
from smelt.compression.distillation.quantizers.minmax import MinMax
from smelt.compression.distillation.teachers import DistilledTraining
from smelt.compression.quantization.layers import LinearLayer
from smelt.errors import RecipeError
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model


@METHODS.register(
    "finetune",
    paper="baseline: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017 (arXiv 1608.08710)",
    needs=("calibration data",),
)
@dataclass(frozen=True)
class FineTune(DistilledTraining):
    """Use after a pruning step, implants included, to recover quality on labels or with the source as a teacher.

    Nothing is quantized: `weights`, `inputs` and `exclude` keep their defaults.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights != MinMax() or self.inputs is not None or self.exclude:
            raise RecipeError("finetune quantizes nothing; remove `weights`, `inputs` and `exclude`, or use qat.")

    def check(self, anatomy: Anatomy) -> None:
        check_float(self, anatomy)
        self.check_teacher(anatomy)

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        return undecided

    @property
    def input_multiple(self) -> int:
        return 1

    def targets(self) -> dict[str, float]:
        return {}

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        facts = super().apply(model, context)
        return {name: fact for name, fact in facts.items() if name not in ("layers_quantized", "bits")}

    def prepare_layers(self, model: Model, context: MethodContext) -> tuple[Sequence[nn.Module], dict[str, Any]]:
        model.network.float()
        return [], {}

    def convert_layers(self, model: Model, context: MethodContext, first: Batch) -> dict[str, Any]:
        return {}

    def _layers(self, anatomy: Anatomy) -> list[LinearLayer]:
        return []
