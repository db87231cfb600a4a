"""What conversions of transformers to integer graphs share: ranges of calibration data and the scales they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import ConversionError
from smelt.runtime.integer.builder import GraphBuilder, QTensor

NewBuilder = Callable[[Mapping[str, str]], GraphBuilder]
NORM_INPUT_MAX = 2**21 - 1
# Model types with an integer form; those of encoders are in encoders.py.
DECODERS = ("llama", "mistral", "qwen2")
VISION_TYPES = ("deit", "vit")


@dataclass(frozen=True)
class ActivationRange:
    """The largest magnitudes of each channel that a module read and wrote on the calibration data."""

    inputs: Tensor
    outputs: Tensor


class Conversion:
    """Base class of conversions: a network, its ranges, and the builder of its graph."""

    builder: GraphBuilder

    def __init__(self, network: PreTrainedModel, ranges: Mapping[str, ActivationRange]) -> None:
        self.network, self.ranges = network, ranges

    def _linear(self, x: QTensor, path: str) -> QTensor:
        module: Any = self.network.get_submodule(path)
        return self.builder.linear(x, module.weight, module.bias, path)

    def _to_norm_input(self, x: QTensor, norm: str, layer: str) -> QTensor:
        """Requantize one of the terms that are added before a norm, to their common scale."""
        scale = positive(self._range(norm).inputs.max(), norm) / NORM_INPUT_MAX
        return self.builder.requantize(
            x, scale, layer, dtype="int32", minimum=-2 * NORM_INPUT_MAX, maximum=2 * NORM_INPUT_MAX
        )

    def _input_scale(self, path: str) -> float:
        return positive(self._range(path).inputs.max(), path) / 127

    def _output_scale(self, path: str) -> float:
        return positive(self._range(path).outputs.max(), path) / 127

    def _range(self, path: str) -> ActivationRange:
        if path not in self.ranges:
            raise ConversionError(f"{path}: it was not reached by the calibration data.")
        return self.ranges[path]


def channel_scales(amax: Tensor, layer: str) -> Tensor:
    """Return the int8 scale of each channel, which the weights that read it absorb.

    Outlier channels of LayerNorm and GELU would otherwise cost all channels their resolution. A scale is at least a
    tenth of the largest one: a channel that was hardly active on the calibration data may be active on other data.
    """
    largest = positive(amax.max(), layer)
    return amax.double().cpu().clamp(min=largest / 10) / 127


def positive(amax: Tensor, layer: str) -> float:
    """Return the largest magnitude of an activation; raise if no scale follows from it."""
    value = float(amax)
    if not 0 < value < float("inf"):
        raise ConversionError(f"{layer}: the largest activation on the calibration data is {value}; check the data.")
    return value
