"""Quantizers of quantization-aware training, one file each."""

from smelt.compression.distillation.quantizers import dorefa, lsq, minmax, nested, pact, pact2, sawb, twn  # noqa: F401  (registers)
from smelt.compression.distillation.quantizers.base import (
    ACTIVATION_QUANTIZERS,
    WEIGHT_QUANTIZERS,
    ActivationQuantizer,
    Learned,
    WeightQuantizer,
)

__all__ = ["ACTIVATION_QUANTIZERS", "WEIGHT_QUANTIZERS", "ActivationQuantizer", "Learned", "WeightQuantizer"]
