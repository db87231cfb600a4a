"""Tensor-parallel shards: each rank keeps some heads and FFN channels of every layer; outputs are all-reduced.

A shard is what surgery leaves after removing all other units, so nothing here depends on the model family. Quantized
layers are split at group boundaries, adapters like their layers.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn

from smelt.errors import ModelError
from smelt.models.anatomy import Part
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear
from smelt.models.surgery import expand_units, keep_units, rows_to_keep
from smelt.numerics.catalog import format_name
from smelt.numerics.format import drop_infinities
from smelt.numerics.scaled import TensorScaled, Ternary
from smelt.serve.engine.adapters import Adapters


def partition_units(model: Model, ranks: int) -> list[list[int]]:
    """Return the unit boundaries of the ranks for every part, both ends included; refuse what cannot be split."""
    return [_unit_boundaries(part, ranks) for part in model.anatomy.parts]


def _unit_boundaries(part: Part, ranks: int) -> list[int]:
    """Split units as evenly as possible without splitting an input group of a quantized output projection."""
    if part.units < ranks:
        raise ModelError(f"{part.path} has {part.units} {part.kind}, too few for {ranks} devices.")
    if part.fixed:
        raise ModelError(f"the {part.kind} of {part.path} are normalized together and cannot be split; use one device.")
    group = units_per_group = 1
    if isinstance(part.output.module, QuantizedLinear):
        reason = _unsupported_reason(part.output.module)
        if reason is not None:
            raise ModelError(f"{part.output.path} cannot be split over several devices: {reason}; use one device.")
        group = _input_group_size(part.output.module)
        units_per_group = math.lcm(group, part.columns_per_unit) // part.columns_per_unit
    groups = [
        (2 * part.units * rank + ranks * units_per_group) // (2 * ranks * units_per_group) for rank in range(ranks)
    ]  # rounded to nearest
    boundaries = [*(units_per_group * group_index for group_index in groups), part.units]
    if any(high <= low for low, high in pairwise(boundaries)):
        raise ModelError(
            f"the {part.units} {part.kind} of {part.path} cannot be split over {ranks} devices: {group} inputs of "
            "the output projection share a scale; use a smaller group_size, per-channel scales, or fewer devices."
        )
    return boundaries


def _unsupported_reason(layer: QuantizedLinear) -> str | None:
    """Return why a layer's inputs cannot be split over several devices, or None."""
    if layer.scheme.hadamard:
        return "its inputs are rotated together"
    if layer.inputs is None or layer.inputs.scale is not None:
        return None
    format_ = layer.inputs.format
    if isinstance(format_, TensorScaled | Ternary):
        return f"the scale of its {format_name(format_)} inputs depends on all of them"
    return None


def _input_group_size(layer: QuantizedLinear) -> int:
    """Return how many adjacent inputs must stay on one device."""
    weights = layer.input_group_size if layer.input_group_size < layer.in_features else 1
    if layer.inputs is None or layer.inputs.scale is not None or _has_token_scale(layer):
        return weights
    return math.lcm(weights, layer.inputs.format.effective_group_size(layer.in_features))


def _has_token_scale(layer: QuantizedLinear) -> bool:
    """Return whether all inputs of a token share one dynamic scale."""
    inputs = layer.inputs
    return (
        inputs is not None
        and inputs.scale is None
        and inputs.format.effective_group_size(layer.in_features) == layer.in_features
    )


def shard(model: Model, rank: int, ranks: int, adapters: Adapters | None = None) -> None:
    """Keep a rank's shard of every layer and adapter, and all-reduce the outputs."""
    for position, boundaries in enumerate(partition_units(model, ranks)):
        part = model.anatomy.parts[position]
        output: Any = part.output.module
        if isinstance(output, QuantizedLinear) and _has_token_scale(output):
            _share_token_scale(output)
        units = torch.arange(boundaries[rank], boundaries[rank + 1])
        if adapters is not None:
            for module, rows in rows_to_keep(part, units):
                adapters.keep_rows(module, rows)
            adapters.keep_columns(output, expand_units(units, part.columns_per_unit))
        keep_units(model.network, part, units.tolist())
    for part in model.anatomy.parts:
        output = part.output.module
        if rank and output.bias is not None:
            nn.init.zeros_(output.bias)  # the first rank adds it
        output.register_forward_hook(_all_reduce_output)


def _share_token_scale(layer: QuantizedLinear) -> None:
    """Compute the dynamic scale of a token from its inputs on all ranks."""
    inputs = layer.inputs
    assert inputs is not None
    format_, clip_ratio = inputs.format, inputs.clip_ratio

    def round_inputs(x: Tensor) -> Tensor:
        finite = drop_infinities(x.float())
        extremes = torch.stack((finite.amax(-1), -finite.amin(-1)))  # [2, ...]
        distributed.all_reduce(extremes, distributed.ReduceOp.MAX)
        qparams = format_.compute_qparams(
            torch.stack((extremes[0], -extremes[1]), -1)[..., None, :], clip_ratio=clip_ratio
        )  # from [..., 1, 2]
        values = format_.dequantize_groups(format_.quantize_groups(format_.split_groups(x), qparams), qparams)
        return values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    layer.round_inputs = round_inputs


def _all_reduce_output(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    distributed.all_reduce(output)
    return output
