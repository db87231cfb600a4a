"""Fold input-channel scales into what produces the channels, without changing the network's function.

A layer group reads x. Its weights are multiplied by s per channel, and the source of x is divided by s: a norm's weight
and bias, the rows of the value projection (for the attention output), or the rows of the up projection (for the
down projection). AWQ, SmoothQuant and AQAS differ only in how they choose s.
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
    """The producer of a group's input channels, which can be divided by a scale."""

    name: ClassVar[str]

    def foldable(self, scale: Tensor) -> Tensor:  # [columns] -> [columns]
        """Return the nearest scale that can be folded exactly."""
        return scale

    @abstractmethod
    def divide(self, scale: Tensor) -> None:
        """Divide the channels by a scale returned by `fitting`."""


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
    """A projection whose outputs reach the group unchanged, or through operations that commute with a scale."""

    projection: Projection

    def divide(self, scale: Tensor) -> None:
        _divide(self.projection.weight, scale[:, None])
        if self.projection.bias is not None:
            _divide(self.projection.bias, scale)


@dataclass(frozen=True)
class UpSource(ProjectionSource):
    """The up projection: its outputs are multiplied by the gate, or go through a ReLU."""

    name = "up projection"


@dataclass(frozen=True)
class ValueSource(ProjectionSource):
    """The value projection: attention mixes positions and never channels."""

    name = "values"
    part: Part

    def foldable(self, scale: Tensor) -> Tensor:
        """Average the scales of query heads that share a KV head (grouped-query attention)."""
        return self._by_head(scale).mean(1, keepdim=True).expand(-1, self.part.heads_per_unit, -1).flatten()

    def divide(self, scale: Tensor) -> None:
        super().divide(self._by_head(scale)[:, 0].flatten())

    def _by_head(self, scale: Tensor) -> Tensor:  # [columns] -> [KV heads, query heads per KV head, head_dim]
        return scale.reshape(self.part.units, self.part.heads_per_unit, self.part.head_dim)


def scale_source(block: Block, group: LayerGroup) -> ScaleSource | None:
    """Return what a scale of this group can be folded into; None if it cannot be folded exactly."""
    part = group.part
    if part is None:
        return None
    if group.is_input_group:  # in a post-norm block the residual also reads the norm: there `pre_norm` is None
        exclusive = part.mixture is None or group.router is not None  # a single expert shares the norm with the others
        return NormSource(part.pre_norm) if exclusive and getattr(part.pre_norm, "weight", None) is not None else None
    if part.kind == "heads":
        return None if part.values is None else ValueSource(part.values, part)
    if part.mixture is not None and not part.mixture.scales:
        return None
    gated = len(part.input_projections) == 2
    return (
        UpSource(part.input_projections[0])
        if gated or any(isinstance(m, nn.ReLU) for m in block.module.modules())
        else None
    )


@torch.no_grad()
def fold_scale(group: LayerGroup, source: ScaleSource, scale: Tensor) -> None:
    """Divide the source by a scale, and multiply the group's weights by it. The router of a mixture and the implant of
    a part read the same channels, so their weights are multiplied too."""
    source.divide(scale)
    if group.is_input_group and group.part is not None and group.part.implant is not None:
        group.part.implant.down.weight.mul_(scale)
    for layer in (*group.layers, *([] if group.router is None else [group.router])):
        layer.weight.copy_(layer.weight * scale)


def _divide(tensor: Tensor, scale: Tensor) -> None:
    tensor.copy_(tensor / scale)  # type promotion keeps the quotient wide; it is rounded once, here
