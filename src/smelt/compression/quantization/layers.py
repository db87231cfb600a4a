"""Layers of a block, grouped by shared input: q, k, v together, then o; gate and up, then down; each convolution alone.

Each expert of a mixture has its own groups, which see the tokens routed to it. A layer that belongs to no part is a
group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compression.calibration.observers import AbsMaxObserver
from smelt.errors import DataError, ModelError
from smelt.models.anatomy import Block, Mixture, Part
from smelt.models.quantized import quantized_layers
from smelt.models.quantized_network import linear_weight


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer, convolution or embedding and its path in the network."""

    module: Any  # Linear, Conv1D, convolution or embedding
    path: str

    @property
    def weight(self) -> Tensor:
        """Return the weight [out, in], a view of the layer's storage; of a convolution a copy."""
        return linear_weight(self.module)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one input tensor, and the part of the block they belong to, if any."""

    part: Part | None
    is_input_group: bool  # the layers are the part's input projections; false: its output projection
    layers: tuple[LinearLayer, ...]
    router: LinearLayer | None = (
        None  # of a mixture, if the group is the input projections of all experts: it shares their input
    )

    @property
    def input_module(self) -> Any:
        """Return a module that receives the complete input of the group."""
        return self.layers[0].module if self.router is None else self.router.module

    @property
    def output_module(self) -> Any:
        """Return the module that outputs the result of the part or mixture."""
        if self.part is None:
            return self.layers[0].module
        mixture = self.mixture
        return self.part.output.module if self.router is None or mixture is None else mixture.module

    @property
    def mixture(self) -> Mixture | None:
        """Return the mixture of experts that the part belongs to."""
        return None if self.part is None else self.part.mixture

    @property
    def may_be_unreached(self) -> bool:
        """Return whether the layers are those of an expert, which calibration tokens need not reach."""
        return self.mixture is not None or (self.part is None and ".experts." in self.path)

    @property
    def path(self) -> str:
        """Return the path of the first layer, which names the group."""
        return self.layers[0].path

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.layers[0].module, nn.Conv1d | nn.Conv2d)

    @property
    def columns(self) -> int:
        return int(self.layers[0].weight.shape[1])

    def stacked(self) -> Tensor:  # [all outputs, in]
        """Return the weights of all layers, concatenated by rows, in float32."""
        return torch.cat([layer.weight.detach().float() for layer in self.layers])

    def split(self, rows: Tensor) -> list[Tensor]:
        """Split a tensor with one row per output into one tensor per layer."""
        return list(rows.split([layer.weight.shape[0] for layer in self.layers]))


def is_quantizable_convolution(module: nn.Module) -> bool:
    """Return whether a module is a convolution that is quantized: state-space models read the weight of their grouped
    1-d convolutions directly."""
    return isinstance(module, nn.Conv2d) or (isinstance(module, nn.Conv1d) and module.groups == 1)


def token_embedding(network: Any) -> LinearLayer:
    """Return the table of token embeddings; raise if it cannot be quantized."""
    try:
        table = network.get_input_embeddings()
    except NotImplementedError:
        table = None
    if type(table) is not nn.Embedding and not (isinstance(table, nn.Embedding) and hasattr(table, "embed_scale")):
        raise ModelError("this network has no plain table of token embeddings to quantize; remove `embeddings`.")
    return LinearLayer(table, _path_of(network, table))


def tied_head(network: Any) -> LinearLayer | None:
    """Return the LM head, if it shares the table of token embeddings."""
    head = network.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is not network.get_input_embeddings().weight:
        return None
    if type(head) is not nn.Linear:
        raise ModelError(
            "the LM head shares the table of token embeddings and is no linear layer; remove `embeddings`."
        )
    return LinearLayer(head, _path_of(network, head))


def _path_of(network: nn.Module, module: nn.Module) -> str:
    return next(path for path, other in network.named_modules() if other is module)


def layer_groups(block: Block) -> list[LayerGroup]:
    """Return the groups of a block: those of its parts in execution order, then layers that belong to no part and
    convolutions."""
    groups = []
    for part in block.parts:
        if not part.units or part.kind == "channels":
            continue
        projections = {projection.path: projection.module for projection in part.input_projections}
        groups.append(LayerGroup(part, True, tuple(LinearLayer(module, path) for path, module in projections.items())))
        groups.append(LayerGroup(part, False, (LinearLayer(part.output.module, part.output.path),)))
    groups.extend(LayerGroup(None, False, (LinearLayer(layer.module, layer.path),)) for layer in block.other_layers)
    for name, module in block.module.named_modules():
        if is_quantizable_convolution(module):
            groups.append(LayerGroup(None, False, (LinearLayer(module, f"{block.path}.{name}"),)))
    return groups


def scale_groups(block: Block) -> list[LayerGroup]:
    """Return the groups that must share an input scale: the input projections of all experts of a mixture read the
    same norm and are one group, together with their router."""
    groups, merged = layer_groups(block), []
    for group in groups:
        mixture = group.mixture
        if mixture is None or not group.is_input_group:
            merged.append(group)
        elif all(other.router is None for other in merged):
            experts = [other for other in groups if other.is_input_group and other.mixture is mixture]
            layers = tuple(layer for other in experts for layer in other.layers)
            merged.append(LayerGroup(group.part, True, layers, LinearLayer(mixture.router, mixture.router_path)))
    return merged


def is_unreached(group: LayerGroup, statistic: Tensor | None) -> bool:
    """Return whether no calibration token reached this expert. For any other layer that is an error: see `observed`."""
    return statistic is None and group.may_be_unreached


def observed(path: str, statistic: Tensor | None) -> Tensor:
    """Return an observer's statistic of a layer's inputs, or raise if it is missing or not finite."""
    if statistic is None:
        raise ModelError(f"{path} was never reached by the calibration data; give more of it.")
    if not bool(statistic.isfinite().all()):
        raise DataError(f"the inputs of {path} are NaN or infinite on the calibration data; it cannot be quantized.")
    return statistic


def few_tokens(layers: Mapping[str, Mapping[str, Any]], network: nn.Module) -> list[dict[str, Any]]:
    """Return the experts that received fewer tokens than one of their layers has inputs.

    The Hessian of such a layer is rank-deficient; an expert without tokens was quantized without data.
    """
    quantized, experts = quantized_layers(network), dict[str, dict[str, Any]]()
    for path, layer in layers.items():
        if "tokens" in layer and layer["tokens"] < quantized[path].in_features:
            expert = experts.setdefault(path.rpartition(".")[0], {"tokens": layer["tokens"], "inputs": 0})
            expert["inputs"] = max(expert["inputs"], quantized[path].in_features)
    return [{"expert": path, **expert} for path, expert in experts.items()]


def share_expert_amax(block: Block, observers_by_path: Mapping[str, AbsMaxObserver]) -> None:
    """Give experts without tokens the largest input of the same layer over the other experts of the block."""
    experts = [part for part in block.parts if part.mixture is not None and part.units]
    for projections in zip(*((*part.input_projections, part.output) for part in experts), strict=True):
        paths = [
            projection.path for projection in projections if projection.path in observers_by_path
        ]  # quantized ones
        observers = [observers_by_path[path] for path in paths]
        observed_amax = [observer.values.amax(0, keepdim=True) for observer in observers if observer.values is not None]
        for observer in observers:
            if observer.values is None and observed_amax:
                observer.values = torch.stack(observed_amax).amax(0)
