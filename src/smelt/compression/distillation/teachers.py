"""Training with an unquantized network as the teacher."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from smelt.compression.base import Batch
from smelt.compression.distillation.base import NetworkTeacher, QuantizationAwareTraining, Student
from smelt.compression.distillation.intermediates import (
    NetworkOutputs,
    ObservedNetwork,
    block_paths,
    check_observable,
)
from smelt.errors import ModelError
from smelt.models.anatomy import anatomy_of
from smelt.models.load import load
from smelt.models.model import Model

SOURCE = "source"


class DenseTeacher(NetworkTeacher):
    """An unquantized network in evaluation mode."""

    def __init__(self, network: Any, intermediates: Collection[str] = ()) -> None:
        if intermediates:
            check_observable(anatomy_of(network), intermediates)
        self.network = network.eval().requires_grad_(False)
        self._observed = ObservedNetwork(network, block_paths(anatomy_of(network)), intermediates)

    def outputs(self, student: Student, batch: Batch) -> NetworkOutputs:
        return self._observed(batch)

    @torch.no_grad()
    def check(self, student: Student, batch: Batch) -> None:
        student.eval()
        ours, theirs = student(**batch), self.outputs(student, batch)
        student.train()
        tensors = [("logits", [ours.logits], [theirs.logits])]
        tensors += [(name, ours.intermediates[name], theirs.intermediates[name]) for name in ours.intermediates]
        for name, own, taught in tensors:
            shapes = [[tuple(tensor.shape[1:]) for tensor in each] for each in (own, taught)]
            if shapes[0] != shapes[1]:
                raise ModelError(
                    f"the teacher's {name.replace('_', ' ')} have other shapes than the student's: {_text(shapes[1])} "
                    f"and {_text(shapes[0])}; take a teacher of the same architecture and size."
                )


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
            return DenseTeacher(copy.deepcopy(model.network), self.intermediates)
        network = load(self.teacher).network
        theirs, ours = (getattr(each.config, "vocab_size", None) for each in (network, model.network))
        if theirs != ours:
            raise ModelError(
                f"the teacher {self.teacher} has a vocabulary of {theirs} tokens and the student one of {ours}; a "
                "teacher needs the same tokenizer."
            )
        return DenseTeacher(network.to(next(model.network.parameters()).device), self.intermediates)


def _text(shapes: list[tuple[int, ...]]) -> str:
    """Describe the shapes of one tensor per block, without the batch."""
    return f"{len(shapes)} of {list(shapes[0])}" if shapes else "none"
