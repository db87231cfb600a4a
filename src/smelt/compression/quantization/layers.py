"""The linear layers of a block in the groups that share an input: q, k, v together, then o; gate and up, then down.

Each expert of a mixture has its own groups, of the tokens that reach it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compression.calibration.observers import AbsMaxObserver
from smelt.errors import DataError, ModelError
from smelt.models.anatomy import Block, Part
from smelt.models.quantized import linear_weight, quantized_layers


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer and its place in the network."""

    module: Any  # Linear or Conv1D
    path: str

    @property
    def weight(self) -> Tensor:
        """[out, in], a view of the layer's own storage."""
        return linear_weight(self.module)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are fed by one tensor, and where in the block they stand."""

    part: Part  # that they belong to
    writes: bool  # they write the part's units; otherwise they read them
    layers: tuple[LinearLayer, ...]
    router: LinearLayer | None = (
        None  # of a mixture, where the group is the writers of all experts: it reads what they read
    )

    @property
    def entrance(self) -> Any:
        """A module that is handed the group's whole input."""
        return self.layers[0].module if self.router is None else self.router.module

    @property
    def exit(self) -> Any:
        """The module that gives what becomes of the units that the group writes."""
        mixture = self.part.mixture
        return self.part.output.module if self.router is None or mixture is None else mixture.module

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


def layer_groups(block: Block) -> list[LayerGroup]:
    """The groups of a block in the order in which they run."""
    found = []
    for part in block.parts:
        if not part.units:
            continue
        writers = {projection.path: projection.module for projection in part.input_projections}
        found.append(LayerGroup(part, True, tuple(LinearLayer(module, path) for path, module in writers.items())))
        found.append(LayerGroup(part, False, (LinearLayer(part.output.module, part.output.path),)))
    return found


def scale_groups(block: Block) -> list[LayerGroup]:
    """The groups as a scale of their inputs sees them: what reads one norm is one group, and so the writers of all
    experts of a mixture are, and their router with them."""
    groups, found = layer_groups(block), []
    for group in groups:
        mixture = group.part.mixture
        if mixture is None or not group.writes:
            found.append(group)
        elif all(one.router is None for one in found):
            together = [one for one in groups if one.writes and one.part.mixture is mixture]
            layers = tuple(layer for one in together for layer in one.layers)
            found.append(LayerGroup(group.part, True, layers, LinearLayer(mixture.router, mixture.router_path)))
    return found


def is_unreached(group: LayerGroup, statistic: Tensor | None) -> bool:
    """No token of the calibration data came to this expert. Of any other layer that is an error: see `observed`."""
    return statistic is None and group.part.mixture is not None


def observed(path: str, statistic: Tensor | None) -> Tensor:
    """What an observer found of a layer's inputs, where it can be worked with."""
    if statistic is None:
        raise ModelError(f"{path} was never reached by the calibration data; give more of it.")
    if not bool(statistic.isfinite().all()):
        raise DataError(f"the inputs of {path} are NaN or infinite on the calibration data; it cannot be quantised.")
    return statistic


def few_tokens(layers: Mapping[str, Mapping[str, Any]], network: nn.Module) -> list[dict[str, Any]]:
    """The experts that fewer tokens reached than a layer of theirs has inputs: what such a layer saw leaves directions
    open (its Hessian has not full rank), and one that saw nothing was rounded without data."""
    held, found = quantized_layers(network), dict[str, dict[str, Any]]()
    for path, layer in layers.items():
        if "tokens" in layer and layer["tokens"] < held[path].in_features:
            expert = found.setdefault(path.rpartition(".")[0], {"tokens": layer["tokens"], "inputs": 0})
            expert["inputs"] = max(expert["inputs"], held[path].in_features)
    return [{"expert": path, **expert} for path, expert in found.items()]


def share_expert_amax(block: Block, seen: Mapping[str, AbsMaxObserver]) -> None:
    """An expert that no token reached takes the largest input that the others of its block saw at that place."""
    experts = [part for part in block.parts if part.mixture is not None and part.units]
    for same in zip(*((*part.input_projections, part.output) for part in experts), strict=True):
        places = [seen[projection.path] for projection in same]
        known = [place.values.amax(0, keepdim=True) for place in places if place.values is not None]
        for place in places:
            if place.values is None and known:
                place.values = torch.stack(known).amax(0)
