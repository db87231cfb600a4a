"""Plain quantization-aware training, with labels or with the unquantized network as a teacher."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.compression.base import METHODS
from smelt.compression.distillation.teachers import DistilledTraining


@METHODS.register("qat", paper="Jacob et al., 2018 (arXiv 1712.05877)", needs=("calibration data",))
@dataclass(frozen=True)
class Qat(DistilledTraining):
    """Use where post-training methods break: 2 and 3 bits, ternary weights, 4-bit activations.

    Any quantizer and any terms of the loss: `losses: [{loss: logits}]` with `teacher: source` is quantization-aware
    distillation (QAD).
    """
