"""Scales of input channels, folded into what produces the channels, so that the network computes the same function.

A group of layers reads x. Its weights are multiplied by s, channel by channel, and what writes x is divided by s: a
norm's weight and bias, the rows of the values (for the attention output), or the rows of the up projection (for the
layer that ends the feed-forward). AWQ, SmoothQuant and AQAS differ only in how they choose s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from smelt.compression.quantization.layers import LayerGroup
from smelt.models.anatomy import Block, Part, Projection


class ScaleSource(ABC):
    """What writes the input channels of a group, and can be divided by a scale."""

    name: ClassVar[str]

    def fitting(self, scale: Tensor) -> Tensor:  # [columns] -> [columns]
        """The nearest scale that can be folded exactly."""
        return scale

    @abstractmethod
    def divide(self, scale: Tensor) -> None:
        """Make the channels smaller by a scale that fits."""


@dataclass(frozen=True)
class NormSource(ScaleSource):
    """A norm that only this group reads."""

    name = "norm"
    module: Any

    def divide(self, scale: Tensor) -> None:
        for tensor in (self.module.weight, getattr(self.module, "bias", None)):
            if tensor is not None:
                _divide(tensor, scale)


@dataclass(frozen=True)
class ProjectionSource(ScaleSource):
    """The rows of a linear map whose outputs reach the group unchanged, or through what commutes with a scale."""

    projection: Projection

    def divide(self, scale: Tensor) -> None:
        _divide(self.projection.weight, scale[:, None])
        if self.projection.bias is not None:
            _divide(self.projection.bias, scale)


@dataclass(frozen=True)
class UpSource(ProjectionSource):
    """The up projection: its outputs are multiplied by the gate's, or pass a ReLU."""

    name = "up projection"


@dataclass(frozen=True)
class ValueSource(ProjectionSource):
    """The value projection: attention mixes positions and never channels."""

    name = "values"
    part: Part

    def fitting(self, scale: Tensor) -> Tensor:
        """With grouped queries several heads read the same values: they share the mean of their scales."""
        return self._by_head(scale).mean(1, keepdim=True).expand(-1, self.part.heads_per_unit, -1).flatten()

    def divide(self, scale: Tensor) -> None:
        super().divide(self._by_head(scale)[:, 0].flatten())

    def _by_head(self, scale: Tensor) -> Tensor:  # [columns] -> [key/value heads, query heads that share one, head_dim]
        return scale.reshape(self.part.units, self.part.heads_per_unit, self.part.head_dim)


def scale_source(block: Block, group: LayerGroup) -> ScaleSource | None:
    """What a scale of this group can be folded into; None where nothing takes it exactly."""
    part = group.part
    if group.writes:  # of a post-norm block the residual reads the norm as well: no feeder
        alone = part.mixture is None or group.router is not None  # one expert shares the norm with the others
        return NormSource(part.pre_norm) if alone and getattr(part.pre_norm, "weight", None) is not None else None
    if part.kind == "heads":
        return None if part.clipped else ValueSource(part.input_projections[2], part)
    gated = len(part.input_projections) == 2
    return (
        UpSource(part.input_projections[0])
        if gated or any(isinstance(m, nn.ReLU) for m in block.module.modules())
        else None
    )


@torch.no_grad()
def fold_scale(group: LayerGroup, source: ScaleSource, scale: Tensor) -> None:
    """Divide what writes the channels by a scale that fits, and multiply the group's weights by it. The router of a
    mixture reads the same channels, so that its weight takes the scale up as well."""
    source.divide(scale)
    for layer in (*group.layers, *([] if group.router is None else [group.router])):
        layer.weight.copy_(layer.weight * scale)


def _divide(tensor: Tensor, scale: Tensor) -> None:
    tensor.copy_(tensor / scale)  # a wider scale makes the quotient wide; it is rounded once, here
