"""What a quantization method gets for one block, and how it replaces the layers of the block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from smelt.compression.base import MethodContext
from smelt.compression.calibration.block_inputs import ActivationStore, BlockInputs
from smelt.compression.calibration.observers import Observer, observe
from smelt.compression.quantization.layers import LayerGroup, layer_groups, scale_groups
from smelt.errors import ModelError
from smelt.models.anatomy import Block
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized_network import quantized_replacement, replace_module
from smelt.numerics.catalog import format_name
from smelt.numerics.format import Format, QuantizedTensor


@dataclass
class BlockWork:
    """One block being quantized: its layer groups, its inputs, and the facts about its quantized layers."""

    block: Block
    block_inputs: BlockInputs | None
    context: MethodContext
    network: nn.Module
    schemes: Mapping[str, QuantizationScheme]  # of the layers to quantize, by path
    facts: dict[str, dict[str, Any]]
    targets: ActivationStore | None = None  # outputs of the original block, one tensor per batch
    original_inputs: ActivationStore | None = None  # outputs of the original blocks before it, if the method asks
    float_inputs: BlockInputs | None = None  # after quantized weights and float activations, if the method asks
    is_last: bool = False  # no block follows
    prepared: Any = None  # what the method's `prepare` returned
    tokens: Mapping[str, int] = field(default_factory=dict)  # routed to each expert, by its path

    @property
    def groups(self) -> list[LayerGroup]:
        """The groups to quantize."""
        return [group for group in layer_groups(self.block) if group.path in self.schemes]

    @property
    def scale_groups(self) -> list[LayerGroup]:
        """The groups that share an input scale, without those of which no layer is quantized."""
        groups = scale_groups(self.block)
        return [group for group in groups if any(layer.path in self.schemes for layer in group.layers)]

    def weight_format(self, group: LayerGroup) -> Format:
        """Return the format in which the weights of a group are quantized."""
        return self.schemes[group.path].weight

    def observe(self, observers: Sequence[tuple[LayerGroup, Observer]]) -> None:
        """Feed each group's inputs to its observer in one pass, which ends at the last one: list them in run order.

        Where layers that belong to no part run is unknown: with them, the pass ends with the block.
        """
        assert self.block_inputs is not None
        observers_by_module = {group.input_module: observer for group, observer in observers}
        ordered = all(group.part is not None for group, _ in observers)
        stop_at = observers[-1][0].input_module if ordered else None
        observe(self.block_inputs, self.block, observers_by_module, stop_at=stop_at)

    def replace_layers(self, group: LayerGroup, quantized: Sequence[QuantizedTensor]) -> None:
        """Replace the layers of a group with quantized ones."""
        for layer, matrix in zip(group.layers, quantized, strict=True):
            if not all(bool(tensor.isfinite().all()) for tensor in matrix.qparams.tensors().values()):
                raise ModelError(f"{layer.path} has values out of the range of {format_name(matrix.format)} scales.")
            scheme = replace(self.schemes[group.path], weight=matrix.format)
            error = relative_error(layer.weight, matrix)
            quantized_layer = quantized_replacement(layer.module, scheme)
            quantized_layer.set_tensors(matrix, layer.module.bias)
            replace_module(self.network, layer.path, quantized_layer)
            part_path = "" if group.part is None else group.part.path
            tokens = {"tokens": self.tokens[part_path]} if part_path in self.tokens else {}
            self.facts[layer.path] = {"scheme": scheme.to_json(), "relative_error": error, **tokens}


def relative_error(weight: Tensor, matrix: QuantizedTensor) -> float:
    """Return the squared error of the weights relative to their squared norm."""
    original = weight.detach().float()
    return float((matrix.dequantize() - original).square().sum() / original.square().sum().clamp(min=1e-30))
