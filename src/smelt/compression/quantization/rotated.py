"""Base class of methods that rotate weights and activations before quantization.

Rotations without runtime cost are merged into the weights (`rotation.py`). Two more run online: a Hadamard transform of
the inputs of the FFN down-projection and of the attention output projection. Its inverse is merged into the layer's
weight here, just before the weight is quantized.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from smelt.compression.base import MethodContext, one_of, within
from smelt.compression.calibration.observers import HessianObserver
from smelt.compression.quantization.base import BlockWork, Quantization
from smelt.compression.quantization.gptq_rounding import DAMPING, round_group
from smelt.compression.quantization.layers import LayerGroup
from smelt.compression.quantization.rotation import Rotations, check_rotatable, rotate_network
from smelt.compression.quantization.rounding import round_to_nearest
from smelt.config import renamed
from smelt.errors import RecipeError
from smelt.kernels.hadamard import hadamard_order, hadamard_transform
from smelt.measure.cost import count_bytes
from smelt.models.anatomy import Anatomy, Part
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import quantized_layers
from smelt.numerics.format import Format, QuantizedTensor


@dataclass(frozen=True)
class RotatedQuantization(Quantization):
    """Rotate, then quantize weights and activations."""

    group_size: int = -1  # weights of a row that share a scale; -1: per-channel
    symmetric: bool = True  # true: no zero points; false: one zero point per group
    input_activations: str | None = "int4"  # their format, with one scale per token; null: float
    input_clip_ratio: float = renamed("clip", default=0.9)  # fraction of an input's range that its grid covers
    rounding: str = "gptq"  # of weights: gptq or rtn
    range_search: bool = renamed("search", default=True)  # choose each row's range to minimize |error|^2.4
    damping: float = DAMPING  # of gptq, relative to the mean of the Hessian diagonal
    act_order: bool = True  # of gptq: quantize columns in order of decreasing Hessian diagonal
    rotate_ffn: bool = renamed("rotate_filters", default=True)  # Hadamard-rotate the FFN down-projection input
    rotate_heads: bool = True  # Hadamard-rotate the attention output-projection input online, across heads

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "rounding", self.rounding, ("gptq", "rtn"))
        within(self.name, "input_clip_ratio", self.input_clip_ratio, 0.1, 1.0)
        within(self.name, "damping", self.damping, 1e-6, 10.0)
        if self.static_activations:
            raise RecipeError(f"{self.name} computes input scales per token: leave static_activations out.")

    @abstractmethod
    def rotations(self, model: Model, context: MethodContext) -> Rotations:
        """Return the rotations to merge into the weights."""

    @property
    def scheme(self) -> QuantizationScheme:
        return super().scheme if self.input_activations is None else replace(super().scheme, clip=self.input_clip_ratio)

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        check_rotatable(anatomy, self.name)

    def prepare(self, model: Model, context: MethodContext) -> dict[str, Any]:
        """Rotate the network; return facts, with its size before a tied head was untied."""
        size = count_bytes(model.network)
        parts = [part for part in model.anatomy.parts if self._should_rotate(part)]
        rotations = self.rotations(model, context)
        rotated = rotate_network(model.anatomy, rotations, context.device)
        return {
            "bytes_before": size,
            **rotated,
            **rotations.facts,
            "widths_without_hadamard": sorted({part.output.in_features for part in parts if not self.rotates(part)}),
        }

    def report(self, prepared: dict[str, Any], network: nn.Module) -> dict[str, Any]:
        rotating = sum(layer.scheme.hadamard for layer in quantized_layers(network).values())
        return {**prepared, "layers_rotating_their_inputs": rotating}

    def quantize(self, work: BlockWork) -> None:
        groups = [(group, HessianObserver()) for group in work.groups]
        if self.rounding == "gptq":
            work.observe(groups)
        for group, hessian in groups:
            if self.rotates_inputs(group):
                rotate_inputs(group, hessian)
            work.replace_layers(group, self.round(group, hessian, work.weight_format(group)))

    def group_scheme(self, group: LayerGroup, prepared: Any) -> QuantizationScheme:
        return replace(self.scheme, hadamard=self.rotates_inputs(group))

    def rotates_inputs(self, group: LayerGroup) -> bool:
        """Return whether the inputs of a group are rotated online."""
        return group.part is not None and not group.is_input_group and self.rotates(group.part)

    def rotates(self, part: Part) -> bool:
        """Return whether the inputs of the part's output projection are rotated online; some sizes have no Hadamard
        matrix."""
        return self._should_rotate(part) and hadamard_order(part.output.in_features) is not None

    def _should_rotate(self, part: Part) -> bool:
        return part.units > 0 and (self.rotate_ffn if part.kind == "ffn_channels" else self.rotate_heads)

    def round(self, group: LayerGroup, hessian: HessianObserver, number_format: Format) -> list[QuantizedTensor]:
        if self.rounding == "rtn":
            return [round_to_nearest(layer.weight, number_format, self.range_search) for layer in group.layers]
        return round_group(
            group, hessian, number_format, damping=self.damping, act_order=self.act_order, search=self.range_search
        )


@torch.no_grad()
def rotate_inputs(group: LayerGroup, hessian: HessianObserver) -> None:
    """Merge the inverse of an online input rotation into the weights, and rotate the Hessian."""
    for layer in group.layers:
        layer.weight.copy_(hadamard_transform(layer.weight.double()))
    if hessian.matrix is not None:
        hessian.matrix = hadamard_transform(hadamard_transform(hessian.matrix).T)
