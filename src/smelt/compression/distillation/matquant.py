"""MatQuant: one 8-bit model whose leading bits are a 4-bit and a 2-bit model (Nair et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.compression.base import METHODS, Batch
from smelt.compression.distillation.fake_quantize import fake_quantized_layers
from smelt.compression.distillation.intermediates import NetworkOutputs
from smelt.compression.distillation.losses import LossTerm
from smelt.compression.distillation.quantizers import WeightQuantizer
from smelt.compression.distillation.quantizers.nested import Nested
from smelt.compression.distillation.student import NetworkTeacher, Student
from smelt.compression.distillation.teachers import DistilledTraining
from smelt.errors import RecipeError
from smelt.train.trainer.tasks import TrainingTask


@METHODS.register("matquant", paper="Nair et al., 2025 (MatQuant, arXiv 2502.06786)", needs=("calibration data",))
@dataclass(frozen=True)
class MatQuant(DistilledTraining):
    """Use to get several precisions from one model: `smelt compress RESULT --method slice --bits 4` takes one out.

    All precisions share the weights and are trained together; the loss is the weighted sum of theirs.
    """

    weights: WeightQuantizer = field(default_factory=Nested)
    slices: tuple[int, ...] = (8, 4, 2)  # bits
    slice_weights: tuple[float, ...] = (0.1, 0.1, 1.0)  # of their losses

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.weights, Nested):
            raise RecipeError("matquant trains nested integers; use `weights: {quantizer: nested}`.")
        for bits in self.slices:
            replace(self.weights, slice_bits=bits)  # checks them
        if not self.slices or len(self.slices) != len(self.slice_weights) or not min(self.slice_weights) > 0:
            raise RecipeError("matquant: `slice_weights` needs one number above 0 for each of `slices`.")

    def make_student(self, network: nn.Module, teacher: NetworkTeacher | None) -> Student:
        return NestedStudent(network, self.losses, teacher, dict(zip(self.slices, self.slice_weights, strict=True)))

    def train(self, task: TrainingTask, *args: Any, **options: Any) -> dict[str, Any]:
        facts = super().train(task, *args, **options)
        losses = {str(bits): loss for bits, loss in _held_out_losses(task, self.slices, self.batch_size).items()}
        return {**facts, "validation_loss_by_bits": losses}


class NestedStudent(Student):
    """Computes the loss of every slice of the weights, and adds them up by their weights."""

    def __init__(
        self, network: nn.Module, losses: tuple[LossTerm, ...], teacher: NetworkTeacher | None, slices: dict[int, float]
    ) -> None:
        super().__init__(network, losses, teacher)
        self.slices = slices

    def forward(self, **batch: Tensor) -> Any:
        batch.pop("use_cache", None)
        if not self.training:
            return self._weighted(batch, lambda outputs: outputs.loss)
        taught = self.taught(batch)
        return self._weighted(batch, lambda outputs: self.loss(outputs, taught, batch))

    def _weighted(self, batch: Batch, loss: Any) -> NetworkOutputs:
        total: Any = 0.0
        for bits, weight in self.slices.items():
            with sliced(self.network, bits):
                outputs = self.observed(self.inputs(batch))
            total = total + weight / sum(self.slices.values()) * loss(outputs)
        return NetworkOutputs(outputs.logits, total)


@contextmanager
def sliced(network: nn.Module, bits: int) -> Iterator[None]:
    """Compute with the leading bits of all nested weights inside the context."""
    layers = fake_quantized_layers(network).values()
    nested = [(layer, layer.weights) for layer in layers if isinstance(layer.weights, Nested)]
    for layer, quantizer in nested:
        layer.weights = replace(quantizer, slice_bits=bits)
    try:
        yield
    finally:
        for layer, quantizer in nested:
            layer.weights = quantizer


@torch.no_grad()
def _held_out_losses(task: TrainingTask, slices: tuple[int, ...], batch_size: int) -> dict[int, float]:
    """Return the mean loss of each slice on the held-out samples."""
    network, samples = task.layers.eval(), task.held_out
    parts = np.array_split(np.arange(len(samples)), math.ceil(len(samples) / batch_size))
    losses = {}
    for bits in slices:
        with sliced(network, bits):
            totals = [len(part) * float(network(**samples.batch(part)).loss) for part in parts]
        losses[bits] = sum(totals) / len(samples)
    return losses
