"""Describe the structure of a network in plain values: blocks, heads, channels, and what each costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from smelt.measure.cost import (
    Workload,
    block_cost,
    block_parameters,
    count_bytes,
    count_parameters,
    shared_macs,
    unit_costs,
)
from smelt.models.anatomy import Anatomy, Block, Part
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.numerics.catalog import format_name

_UNIT_NAMES = {"ffn_channels": "FFN channels", "channels": "channels"}


def describe_structure(anatomy: Anatomy, tokens: int) -> dict[str, Any]:
    """Describe a network; MACs are those of a sequence of `tokens`, or of one image."""
    image_size = getattr(anatomy.network.config, "image_size", None)
    workload = Workload(tokens=tokens, image_size=image_size if isinstance(image_size, int) else 224)
    prices = zip(anatomy.parts, unit_costs(anatomy, "macs", workload), strict=True)
    costs = {part.name: part.units * price + shared_macs(part, workload) for part, price in prices}
    return {
        "family": anatomy.family.name,
        "parameters": count_parameters(anatomy.network),
        "block_parameters": block_parameters(anatomy),
        "bytes": count_bytes(anatomy.network),
        "macs": block_cost(anatomy, "macs", workload),
        "tokens": tokens,
        "blocks": [_block(block, costs) for block in anatomy.blocks],
        "shape": anatomy.shape(),
    }


def describe_precision(network: nn.Module) -> dict[str, Any]:
    """Return how many layers are quantized in which way, and how many layers with weights stay in float, by type."""
    quantized = quantized_layers(network)
    schemes = Counter(layer.scheme for layer in quantized.values())
    others = Counter(
        type(module).__name__
        for module in network.modules()
        if not isinstance(module, QuantizedLinear) and any(True for _ in module.parameters(recurse=False))
    )
    rows = [
        {
            "weights": format_name(scheme.weight),
            "inputs": None if scheme.inputs is None else format_name(scheme.inputs),
            "static": scheme.static,
            "layers": layers,
        }
        for scheme, layers in schemes.items()
    ]
    return {"quantized": rows, "float": dict(sorted(others.items()))}


def _block(block: Block, costs: dict[str, float]) -> dict[str, Any]:
    heads = next((part for part in block.parts if part.kind == "heads"), None)
    others = [part for part in block.parts if part.kind != "heads"]
    attention = "-"
    if heads is not None:
        attention = f"{heads.units * heads.heads_per_unit} heads of {heads.head_dim}"
        attention += f" in {heads.units} KV groups" if heads.heads_per_unit > 1 else ""
    return {
        "block": block.index,
        "attention": attention,
        "feed_forward": _experts(others) or ", ".join(f"{part.units} {_UNIT_NAMES[part.kind]}" for part in others),
        "parameters": count_parameters(block.module),
        "macs": sum(costs[part.name] for part in block.parts),
    }


def _experts(parts: list[Part]) -> str:
    """Describe a mixture of experts, or carved ones; empty for a dense feed-forward."""
    carved = [part for part in parts if part.carved]
    if carved:
        shared = next(part.units for part in parts if not part.carved)
        return f"{shared} FFN channels and 1 of {len(carved)} experts of {_spread(carved)}"
    mixture = parts[0].mixture if parts else None
    if mixture is None:
        return ""
    return f"{mixture.num_experts} experts of {_spread(parts)} FFN channels, {mixture.top_k} per token"


def _spread(parts: list[Part]) -> str:
    """Return the width of the parts, or the smallest and the largest."""
    widths = sorted({part.units for part in parts})
    return f"{widths[0]} to {widths[-1]}" if len(widths) > 1 else str(widths[0])
