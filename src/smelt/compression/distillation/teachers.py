"""Training with an unquantized network as the teacher."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from smelt.compression.base import Batch, within
from smelt.compression.distillation.base import QuantizationAwareTraining
from smelt.compression.distillation.cached_teacher import CachedTeacher
from smelt.compression.distillation.intermediates import (
    NetworkOutputs,
    ObservedNetwork,
    block_paths,
    check_observable,
)
from smelt.compression.distillation.network_training import SOURCE
from smelt.compression.distillation.student import NetworkTeacher, Student
from smelt.errors import ModelError, RecipeError
from smelt.models.anatomy import Anatomy
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.load import load, load_config
from smelt.models.model import Model
from smelt.train.trainer.regional_compilation import compile_network, repeated_blocks


class DenseTeacher(NetworkTeacher):
    """An unquantized network in evaluation mode. Its maps of the blocks `without_map` are left out, as a student's."""

    def __init__(self, network: Any, intermediates: Collection[str] = (), without_map: Collection[int] = ()) -> None:
        if intermediates:
            check_observable(anatomy_of(network), intermediates)
        self.network = network.eval().requires_grad_(False)
        paths = block_paths(anatomy_of(network))
        paths = tuple(
            replace(block, has_map=block.has_map and index not in without_map) for index, block in enumerate(paths)
        )
        self._observed = ObservedNetwork(network, paths, intermediates)

    def compile(self) -> None:
        if repeated_blocks(self.network):
            compile_network(self.network)

    def outputs(self, student: Student, batch: Batch) -> NetworkOutputs:
        inputs = student.inputs(batch)
        if not getattr(self.network.config, "is_encoder_decoder", False):  # such a decoder reads the labels
            inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}  # its own loss is not used
        return self._observed(inputs)

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
    cache_logits: int | None = None  # so many of the teacher's logits per token are computed once and kept on disk

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_logits is None:
            return
        within(self.name, "cache_logits", self.cache_logits, 1, 1_000_000)
        if self.augment:
            raise RecipeError(f"{self.name} changes the images in every epoch; remove `augment` or `cache_logits`.")
        if self.intermediates:
            names = ", ".join(sorted(self.intermediates)).replace("_", " ")
            raise RecipeError(f"{self.name} compares the teacher's {names} as well as logits; remove `cache_logits`.")

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        self.check_teacher(anatomy)

    def check_teacher(self, anatomy: Anatomy) -> None:
        """Raise if the teacher has another vocabulary, by its config alone."""
        if self.teacher is None or self.teacher == SOURCE or not self.needs_teacher:
            return
        theirs, ours = (
            getattr(config, "vocab_size", None) for config in (load_config(self.teacher), anatomy.network.config)
        )
        if theirs != ours:
            raise ModelError(
                f"the teacher {self.teacher} has a vocabulary of {theirs} tokens and the student one of {ours}; a "
                "teacher needs the same tokenizer."
            )

    @property
    def has_teacher(self) -> bool:
        return self.teacher is not None

    def make_teacher(self, model: Model) -> NetworkTeacher | None:
        if self.teacher is None or not self.needs_teacher:
            return None
        dense = self._dense_teacher(model, self.teacher)
        return dense if self.cache_logits is None else CachedTeacher(dense, self.cache_logits)

    def _dense_teacher(self, model: Model, name: str) -> DenseTeacher:
        if name == SOURCE:
            return DenseTeacher(copy.deepcopy(model.network), self.intermediates)
        return DenseTeacher(load(name).network.to(next(model.network.parameters()).device), self.intermediates)


def _text(shapes: list[tuple[int, ...]]) -> str:
    """Describe the shapes of one tensor per block, without the batch."""
    return f"{len(shapes)} of {list(shapes[0])}" if shapes else "none"
