"""SPEQ: the network teaches itself, with activations of randomly chosen precision (Boo et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from smelt.compression.base import METHODS, Batch, within
from smelt.compression.distillation.base import QuantizationAwareTraining
from smelt.compression.distillation.fake_quantize import fake_quantized_layers, other_input_bits
from smelt.compression.distillation.intermediates import NetworkOutputs
from smelt.compression.distillation.losses import Cosine, Labels, LossTerm
from smelt.compression.distillation.quantizers import ActivationQuantizer, WeightQuantizer
from smelt.compression.distillation.quantizers.pact import Pact
from smelt.compression.distillation.quantizers.sawb import Sawb
from smelt.compression.distillation.student import NetworkTeacher, Student
from smelt.errors import RecipeError
from smelt.models.batch_norm import batch_statistics
from smelt.models.model import Model


class StochasticPrecisionTeacher(NetworkTeacher):
    """The student itself, each of whose layers has high-precision inputs with some probability."""

    def __init__(self, probability: float, high_bits: int) -> None:
        self.probability, self.high_bits = probability, high_bits
        self._observe: Callable[[Student, Batch], NetworkOutputs] = _observe

    def compile(self) -> None:
        """Compile the teacher's pass apart from the student's, which has other precision and running statistics."""
        self._observe = torch.compile(_observe)

    @torch.compiler.disable  # changes attributes of modules, for which the student would be compiled again
    def outputs(self, student: Student, batch: Batch) -> Any:
        device = next(student.network.parameters()).device
        drawn = torch.rand(len(fake_quantized_layers(student.network)), device=device) < self.probability
        with other_input_bits(student.network, self.high_bits, drawn), batch_statistics(student.network):
            return self._observe(student, batch)


def _observe(student: Student, batch: Batch) -> NetworkOutputs:
    return student.observed(batch)


@METHODS.register("speq", paper="Boo et al., 2021 (SPEQ, arXiv 2009.14502)", needs=("calibration data",))
@dataclass(frozen=True)
class Speq(QuantizationAwareTraining):
    """Use for low-bit activations without a second model: it learns from itself at mixed precision.

    The weight and temperature of the cosine term were swept in the paper and are not known; 1 and 1 are ours.
    """

    weights: WeightQuantizer = field(default_factory=Sawb)
    inputs: ActivationQuantizer | None = field(default_factory=Pact)
    losses: tuple[LossTerm, ...] = (Labels(), Cosine())
    probability: float = 0.5  # that the teacher's layer has inputs of high precision
    high_bits: int = 8  # of these

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "probability", self.probability, 0.0, 1.0)
        within(self.name, "high_bits", self.high_bits, 2, 8)
        if self.inputs is None:
            raise RecipeError("speq varies the precision of activations: give a quantizer of `inputs`, such as pact.")

    @property
    def has_teacher(self) -> bool:
        return True

    def make_teacher(self, model: Model) -> NetworkTeacher | None:
        return StochasticPrecisionTeacher(self.probability, self.high_bits)
