"""Experts that the calibration data showed too little of: what is told of them, and what is lent to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smelt.compression.calibration.observe import Largest
from smelt.models.anatomy import Block
from smelt.models.quantized import quantized_layers


def few_tokens(layers: Mapping[str, Mapping[str, Any]], network: nn.Module) -> list[dict[str, Any]]:
    """The experts that fewer tokens reached than a layer of theirs has inputs: what such a layer saw leaves directions
    open (its Hessian has not full rank), and one that saw nothing was rounded without data."""
    held, found = quantized_layers(network), dict[str, dict[str, Any]]()
    for path, layer in layers.items():
        if "tokens" in layer and layer["tokens"] < held[path].in_features:
            expert = found.setdefault(path.rpartition(".")[0], {"tokens": layer["tokens"], "inputs": 0})
            expert["inputs"] = max(expert["inputs"], held[path].in_features)
    return [{"expert": path, **expert} for path, expert in found.items()]


def lend_largest(block: Block, seen: Mapping[str, Largest]) -> None:
    """An expert that no token reached takes the largest input that the others of its block saw at that place."""
    experts = [part for part in block.parts if part.mixture is not None and part.units]
    for same in zip(*((*part.input_projections, part.output) for part in experts), strict=True):
        places = [seen[projection.path] for projection in same]
        known = [place.values.amax(0, keepdim=True) for place in places if place.values is not None]
        for place in places:
            if place.values is None and known:
                place.values = torch.stack(known).amax(0)
