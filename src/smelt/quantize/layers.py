"""The linear layers of a block in the groups that share an input: q, k, v together, then o; gate and up, then down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smelt.errors import DataError, ModelError
from smelt.models.anatomy import Block, Part
from smelt.models.quantized import linear_weight


@dataclass(frozen=True)
class Layer:
    """One linear layer and its place in the network."""

    module: Any  # Linear or Conv1D
    path: str

    @property
    def weight(self) -> Tensor:
        """[out, in], a view of the layer's own storage."""
        return linear_weight(self.module)


@dataclass(frozen=True)
class Group:
    """Layers that are fed by one tensor, and where in the block they stand."""

    part: Part  # that they belong to
    writes: bool  # they write the part's units; otherwise they read them
    layers: tuple[Layer, ...]

    @property
    def path(self) -> str:
        """Of its first layer, which names the group."""
        return self.layers[0].path

    @property
    def columns(self) -> int:
        return int(self.layers[0].weight.shape[1])

    def stacked(self) -> Tensor:  # [all outputs, in]
        """The weights of all layers, one above the other, in float32."""
        return torch.cat([layer.weight.detach().float() for layer in self.layers])

    def split(self, rows: Tensor) -> list[Tensor]:
        """What belongs to each layer of something with a row for every output."""
        return list(rows.split([layer.weight.shape[0] for layer in self.layers]))


def groups_of(block: Block) -> list[Group]:
    """The groups of a block in the order in which they run."""
    found = []
    for part in block.parts:
        if not part.units:
            continue
        writers = {projection.path: projection.module for projection in part.writers}
        found.append(Group(part, True, tuple(Layer(module, path) for path, module in writers.items())))
        found.append(Group(part, False, (Layer(part.output.module, part.output.path),)))
    return found


def observed(path: str, statistic: Tensor | None) -> Tensor:
    """What an observer found of a layer's inputs, where it can be worked with."""
    if statistic is None:
        raise ModelError(f"{path} was never reached by the calibration data; give more of it.")
    if not bool(statistic.isfinite().all()):
        raise DataError(f"the inputs of {path} are NaN or infinite on the calibration data; it cannot be quantised.")
    return statistic
