"""Take the leading bits of a model that was trained for it (MatQuant), without data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from smelt.compression.base import METHODS, Method, MethodContext, UndecidedWidth, within
from smelt.errors import FormatError, ModelError
from smelt.measure.cost import count_bytes
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.numerics.nested import check_nested, slice_tensor


@METHODS.register("slice", paper="Nair et al., 2025 (MatQuant, arXiv 2502.06786)")
@dataclass(frozen=True)
class Slice(Method):
    """Use on a model trained by matquant, to take the model of fewer bits out of it; it needs no data.

    It works on any symmetric integers, but weights that were not trained for it lose much more than by rounding.
    """

    bits: int = 4  # of the result, at most those of the model

    def __post_init__(self) -> None:
        within(self.name, "bits", self.bits, 2, 8)

    def check(self, anatomy: Anatomy) -> None:
        layers = quantized_layers(anatomy.network)
        if not layers:
            raise ModelError("slice takes bits out of a quantized model; train one with matquant first.")
        for path, layer in layers.items():
            try:
                check_nested(layer.scheme.weight, self.bits)
            except FormatError as error:
                raise ModelError(f"{path} cannot be sliced: {error}") from error

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        for layer in quantized_layers(anatomy.network).values():
            layer.scheme = replace(layer.scheme, weight=replace(layer.scheme.weight, bits=self.bits))  # type: ignore[call-arg]
        return undecided

    def targets(self) -> dict[str, float]:
        return {"bits": self.bits}

    def bytes_change(self, anatomy: Anatomy) -> int:
        layers = quantized_layers(anatomy.network).values()
        return -sum(
            layer.in_features * layer.out_features * (layer.scheme.weight.bits - self.bits) // 8 for layer in layers
        )

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        self.check(model.anatomy)
        before, layers = count_bytes(model.network), quantized_layers(model.network)
        for layer in layers.values():
            _slice_layer(layer, self.bits)
        return {"layers_sliced": len(layers), "bytes_before": before, "bytes_after": count_bytes(model.network)}


def _slice_layer(layer: QuantizedLinear, bits: int) -> None:
    static_inputs = layer.static_inputs
    quantized = slice_tensor(layer.packed.unpack(), bits)
    layer.scheme = replace(layer.scheme, weight=quantized.format)
    layer.set_tensors(quantized, None)
    if layer.scheme.static:
        layer.set_static_inputs(*static_inputs)
