"""Plain quantization-aware training, with labels or with the unquantized network as a teacher."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from smelt.compression.base import METHODS, Batch
from smelt.compression.distillation.base import QuantizationAwareTraining, Student, Teacher
from smelt.errors import ModelError
from smelt.models.load import load
from smelt.models.model import Model

SOURCE = "source"


class DenseTeacher(Teacher):
    """An unquantized network in evaluation mode."""

    def __init__(self, network: Any) -> None:
        self.network = network.eval().requires_grad_(False)

    def outputs(self, student: Student, batch: Batch) -> Any:
        return self.network(**batch)


@METHODS.register("qat", paper="Jacob et al., 2018 (arXiv 1712.05877)", needs=("calibration data",))
@dataclass(frozen=True)
class Qat(QuantizationAwareTraining):
    """Use where post-training methods break: 2 and 3 bits, ternary weights, 4-bit activations.

    Any quantizer and any terms of the loss: `losses: [{loss: logits}]` with `teacher: source` is quantization-aware
    distillation (QAD).
    """

    teacher: str | None = None  # source: the model before this step; or a model, a name or folder; null: none

    @property
    def has_teacher(self) -> bool:
        return self.teacher is not None

    def make_teacher(self, model: Model) -> Teacher | None:
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
