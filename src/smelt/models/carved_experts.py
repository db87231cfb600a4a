"""Feed-forwards carved into experts: channels that every token uses, and one group of channels per expert.

A token uses the shared channels and those of its expert, which is the same in all layers: one router, which reads token
ids, chooses it before the first layer. So tokens are sorted by expert once for all layers. Works on the meta device,
which is how a saved artifact is restored before its weights are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy, Part
from smelt.models.carved_feed_forward import CarvedFeedForward, ExpertRoutes, gated
from smelt.models.expert_router import ExpertRouter, RouterConfig
from smelt.models.experts import Expert
from smelt.models.families import ExpertPaths
from smelt.models.quantized import quantized_layers
from smelt.models.quantized_network import replace_module

ROUTER = "expert_router"  # the name of the router in a network


@dataclass(frozen=True)
class LayerChannels:
    """How the channels of one feed-forward are divided: positions of the shared ones, and those of each expert."""

    shared: tuple[int, ...]
    experts: tuple[tuple[int, ...], ...]


def carve(anatomy: Anatomy, channels: Sequence[LayerChannels], router: ExpertRouter) -> ExpertRoutes:
    """Carve the feed-forwards of a network in place, one entry per block, and put the router ahead of its layers."""
    check_carvable(anatomy)
    network: Any = anatomy.network
    routes = ExpertRoutes(router)
    for part, layer in zip(_feed_forwards(anatomy), channels, strict=True):
        _carve_layer(anatomy, part, layer, routes)
    setattr(network, ROUTER, router)
    backbone: Any = anatomy.backbone
    backbone.register_forward_pre_hook(routes.begin, with_kwargs=True)
    backbone.register_forward_hook(routes.end)
    return routes


def check_carvable(anatomy: Anatomy) -> None:
    """Raise if the feed-forwards of a network cannot be carved into experts."""
    network: Any = anatomy.network
    model_type = network.config.model_type
    if carved_routes_of(network) is not None:
        raise ModelError("the feed-forwards of this model are carved into experts already; start from its source.")
    if anatomy.mixtures:
        raise ModelError("this model is a mixture of experts already; remove some of them instead (reap).")
    if quantized_layers(network):
        raise ModelError("this model is quantized already; carve its source model, then quantize the result.")
    parts = _feed_forwards(anatomy)
    is_simple = anatomy.family.causal and anatomy.family.chain is True and anatomy.residual == "pre"
    if not is_simple or anatomy.backbone is not network.base_model or len(parts) != len(anatomy.blocks):
        raise ModelError(f"experts are carved from decoders with one feed-forward per block, not from {model_type}.")
    for part in parts:
        module = network.get_submodule(part.path)
        layers = [projection.module for projection in (*part.input_projections, part.output)]
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        plain = len({id(layer) for layer in layers}) == 3 == len(children) and all(
            type(layer) is nn.Linear for layer in layers
        )
        if not plain or not callable(getattr(module, "act_fn", None)):
            raise ModelError(
                f"experts are carved from feed-forwards with a gate, such as SwiGLU, and {part.path} of {model_type} "
                "is none; remove channels instead (fisher)."
            )
        if part.output.bias is not None:
            raise ModelError(f"{part.output.path} has a bias, which would be added for shared and own channels.")


def carved_routes_of(network: nn.Module) -> ExpertRoutes | None:
    """Return what holds the routing of a network with carved experts; None if it has none."""
    return next((module.routes for module in carved_layers(network)), None)


def carved_layers(network: nn.Module) -> list[CarvedFeedForward]:
    return [module for module in network.modules() if isinstance(module, CarvedFeedForward)]


def refuse_carved_experts(network: nn.Module, what: str) -> None:
    """Raise if the feed-forwards of a network are carved into experts; `what` cannot keep them."""
    if carved_routes_of(network) is not None:
        raise ModelError(f"the feed-forwards of this model are carved into experts, and {what}.")


def describe_carving(network: nn.Module) -> dict[str, Any] | None:
    """Return the shape of carved experts as plain data; None if there are none."""
    layers = carved_layers(network)
    if not layers:
        return None
    sizes = [
        {
            "shared": _width(layer.get_submodule(layer.names.down)),
            "experts": [_width(expert.get_submodule(layer.names.down)) for expert in layer.experts],
        }
        for layer in layers
    ]
    return {"router": layers[0].routes.router.config.to_json(), "layers": sizes}


def restore_carving(anatomy: Anatomy, entry: Any, where: str) -> None:
    """Carve a freshly built network as the `carved_experts` of a smelt.json say, which is checked first; the weights
    are loaded afterwards."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("layers"), list):
        raise ModelError(f"{where}: the carved experts in smelt.json are not a router and a list of layers.")
    config = RouterConfig.from_json(entry.get("router"), where)
    check_carvable(anatomy)
    parts, layers = _feed_forwards(anatomy), entry["layers"]
    fits = len(parts) == len(layers) and config.vocab_size == anatomy.network.config.vocab_size
    if not fits or not all(
        _fits(part, layer, config.experts) for part, layer in zip(parts, layers, strict=len(parts) == len(layers))
    ):
        raise ModelError(f"{where}: the carved experts in smelt.json do not fit this network.")
    channels = [
        LayerChannels(tuple(range(layer["shared"])), tuple(tuple(range(size)) for size in layer["experts"]))
        for layer in layers
    ]
    carve(anatomy, channels, ExpertRouter(config))


def _fits(part: Part, layer: Any, experts: int) -> bool:
    if not isinstance(layer, Mapping) or type(layer.get("shared")) is not int:
        return False
    sizes = layer.get("experts")
    if not isinstance(sizes, list) or len(sizes) != experts or not all(type(size) is int for size in sizes):
        return False
    return layer["shared"] >= 0 and all(0 <= size <= part.units - layer["shared"] for size in sizes)


def _carve_layer(anatomy: Anatomy, part: Part, channels: LayerChannels, routes: ExpertRoutes) -> None:
    module: Any = anatomy.network.get_submodule(part.path)
    up, gate = (projection.path.removeprefix(f"{part.path}.") for projection in part.input_projections)
    names = ExpertPaths(
        part.path, ROUTER, gate=gate, up=up, down=part.output.path.removeprefix(f"{part.path}."), published=False
    )
    activation = module.act_fn
    shared, *experts = (
        _expert(part, names, activation, positions) for positions in (channels.shared, *channels.experts)
    )
    carved: Any = CarvedFeedForward(names, shared, experts, activation, routes)
    down = carved.get_submodule(names.down)
    down.smelt_original_units = part.original_units
    carved.train(module.training)
    replace_module(anatomy.network, part.path, carved)


def _expert(part: Part, names: ExpertPaths, activation: Any, positions: Sequence[int]) -> Expert:
    up, gate = part.input_projections
    index = torch.tensor(positions, dtype=torch.int64, device=part.output.device)
    gate_layer, up_layer = (
        _linear(projection.weight.detach().index_select(0, index), _bias(projection, index))
        for projection in (gate, up)
    )
    down = _linear(part.output.weight.detach().index_select(1, index), None)
    return Expert(names, gate_layer, up_layer, down, partial(gated, activation))


def _bias(projection: Any, index: Tensor) -> Tensor | None:
    return None if projection.bias is None else projection.bias.detach().index_select(0, index)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=bias is not None, device="meta")  # which warns if a size is 0
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        layer.bias = nn.Parameter(bias.contiguous())
    return layer


def _width(layer: Any) -> int:
    return int(layer.in_features)


def _feed_forwards(anatomy: Anatomy) -> list[Part]:
    return [part for part in anatomy.parts if part.kind == "ffn_channels"]
