"""Training with an unquantized network as the teacher."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from smelt.compression.base import Batch
from smelt.compression.distillation.base import NetworkTeacher, QuantizationAwareTraining, Student
from smelt.errors import ModelError
from smelt.models.load import load
from smelt.models.model import Model

SOURCE = "source"


class DenseTeacher(NetworkTeacher):
    """An unquantized network in evaluation mode."""

    def __init__(self, network: Any) -> None:
        self.network = network.eval().requires_grad_(False)

    def outputs(self, student: Student, batch: Batch) -> Any:
        return self.network(**batch)


@dataclass(frozen=True)
class DistilledTraining(QuantizationAwareTraining):
    """Quantization-aware training that may have an unquantized teacher."""

    teacher: str | None = None  # source: the model before this step; or a model, a name or folder; null: none

    @property
    def has_teacher(self) -> bool:
        return self.teacher is not None

    def make_teacher(self, model: Model) -> NetworkTeacher | None:
        if self.teacher is None or not self.needs_teacher:
            return None
        if self.teacher == SOURCE:
            return DenseTeacher(copy.deepcopy(model.network))
        network = load(self.teacher).network
        theirs, ours = (getattr(each.config, "vocab_size", None) for each in (network, model.network))
        if theirs != ours:
            raise ModelError(
                f"the teacher {self.teacher} has a vocabulary of {theirs} tokens and the student one of {ours}; a "
                "teacher needs the same tokenizer."
            )
        return DenseTeacher(network.to(next(model.network.parameters()).device))
