"""AQAS: search input-channel scales by the joint quantization error of weights and activations, for W4A8
(Lee et al., EMNLP 2023, arXiv 2311.05161).

The paper's candidates are not known to us; we try those of AWQ and of SmoothQuant. Weights are in dINT, whose two
denormal codes keep small weights from underflowing to zero. The third part, SLAC, is a rule for the data: calibrate
with sequences as long as those of the task (`seq_len` of the recipe's data), as activation ranges grow with the
sequence length in some families. The result reports the calibration length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.quantization.layers import LayerGroup, LinearLayer
from smelt.compression.quantization.scale_search import STEPS, Candidate, ScaleSearch, balance_scale, power_scale
from smelt.models.model import Model
from smelt.numerics.catalog import get_format
from smelt.numerics.error import underflow_share
from smelt.numerics.format import Format, QuantizedTensor
from smelt.numerics.integer import DenormalInteger, Integer


@METHODS.register("aqas", paper="Lee et al., 2023 (arXiv 2311.05161)", needs=("calibration data",))
@dataclass(frozen=True)
class Aqas(ScaleSearch):
    """Use for 4-bit weights with 8-bit activations (W4A8).

    Set the data's `seq_len` to the length of the task's inputs: scales found on long sequences can hurt short ones.
    """

    group_size: int = -1
    input_activations: str | None = "int8"
    denormal: bool = True  # dINT; false: plain integers
    rounding: str = "gptq"

    @property
    def weight_format(self) -> Format:
        if self.format is not None:
            return get_format(self.format)
        integer = DenormalInteger if self.denormal else Integer
        return integer(self.group_size, "float16", self.bits, self.symmetric)

    @property
    def search_input_format(self) -> Format | None:
        return self.input_format

    def candidates(self, group: LayerGroup, mean: Tensor, amax: Tensor) -> Iterator[Candidate]:
        weights = group.stacked().abs().amax(0).clamp(min=1e-5)
        for step in range(STEPS):
            yield Candidate("mean", step / STEPS, power_scale(mean, step / STEPS))
        for step in range(STEPS):
            exponent = step / STEPS
            scale = amax.pow(exponent) / weights.pow(1 - exponent)
            yield Candidate("smooth", exponent, balance_scale(scale.clamp(min=1e-5)))

    def layer_facts(self, layer: LinearLayer, matrix: QuantizedTensor) -> dict[str, Any]:
        """Return the fraction of weights that underflowed to zero, and their share of the error."""
        vanished, underflow = underflow_share(layer.weight.detach(), matrix.dequantize())
        return {"vanished": vanished, "error_share": {"underflow": underflow, "rounding": 1 - underflow}}

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        return {**super().apply(model, context), "calibration_length": context.mean_tokens}
