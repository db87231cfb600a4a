"""A rank's share of a model: some heads and filters of every layer, and outputs that are summed over the ranks.

A share is what surgery leaves when all other units are removed, so that nothing here knows a family. Quantised layers
are cut where their groups end; adapters are cut as their layers are.
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


def shares(model: Model, ranks: int) -> list[list[int]]:
    """For every part, between which units it is cut, the ends included; what cannot be split is refused."""
    return [_cuts(part, ranks) for part in model.anatomy.parts]


def _cuts(part: Part, ranks: int) -> list[int]:
    """As even as it can be: where the output is quantised, its groups of inputs stay whole."""
    if part.units < ranks:
        raise ModelError(f"{part.path} has {part.units} {part.kind}, too few for {ranks} devices.")
    if part.fixed:
        raise ModelError(f"the {part.kind} of {part.path} are normed together and cannot be split; use one device.")
    together = step = 1
    if isinstance(part.output.module, QuantizedLinear):
        against = _reason_against(part.output.module)
        if against is not None:
            raise ModelError(f"{part.output.path} cannot be split over several devices: {against}; use one device.")
        together = _inputs_together(part.output.module)
        step = math.lcm(together, part.columns_per_unit) // part.columns_per_unit
    pieces = [(2 * part.units * each + ranks * step) // (2 * ranks * step) for each in range(ranks)]  # the nearest
    cuts = [*(step * piece for piece in pieces), part.units]
    if any(high <= low for low, high in pairwise(cuts)):
        raise ModelError(
            f"the {part.units} {part.kind} of {part.path} cannot be split over {ranks} devices: {together} inputs of "
            "what reads them share a scale; quantise with a smaller group or with a scale a row, or use fewer devices."
        )
    return cuts


def _reason_against(layer: QuantizedLinear) -> str | None:
    """Why the inputs of a layer cannot lie on several devices."""
    if layer.scheme.hadamard:
        return "its inputs are rotated all together"
    if layer.inputs is None or layer.inputs.scale is not None:
        return None
    form = layer.inputs.format
    if isinstance(form, TensorScaled | Ternary):
        return f"a scale of its inputs in {format_name(form)} depends on all of them"
    return None


def _inputs_together(layer: QuantizedLinear) -> int:
    """Neighbouring inputs that must lie on one device."""
    weights = layer.input_group_size if layer.input_group_size < layer.in_features else 1
    if layer.inputs is None or layer.inputs.scale is not None or _rounds_together(layer):
        return weights
    return math.lcm(weights, layer.inputs.format.effective_group_size(layer.in_features))


def _rounds_together(layer: QuantizedLinear) -> bool:
    """All inputs of a token share a scale that is taken from them."""
    inputs = layer.inputs
    return (
        inputs is not None
        and inputs.scale is None
        and inputs.format.effective_group_size(layer.in_features) == layer.in_features
    )


def shard(model: Model, rank: int, ranks: int, adapters: Adapters | None = None) -> None:
    """Leave a rank's share of every layer and of its adapters, and sum the outputs over the ranks."""
    for position, cuts in enumerate(shares(model, ranks)):
        part = model.anatomy.parts[position]
        output: Any = part.output.module
        if isinstance(output, QuantizedLinear) and _rounds_together(output):
            _round_together(output)
        units = torch.arange(cuts[rank], cuts[rank + 1])
        if adapters is not None:
            for module, rows in rows_to_keep(part, units):
                adapters.keep_rows(module, rows)
            adapters.keep_columns(output, expand_units(units, part.columns_per_unit))
        keep_units(model.network, part, units.tolist())
    for part in model.anatomy.parts:
        output = part.output.module
        if rank and output.bias is not None:
            nn.init.zeros_(output.bias)  # the first rank adds it
        output.register_forward_hook(_summed)


def _round_together(layer: QuantizedLinear) -> None:
    """Let the scale of a token's inputs be that of the inputs on all ranks, not of those that are here."""
    inputs = layer.inputs
    assert inputs is not None
    form, clip = inputs.format, inputs.clip_ratio

    def rounded(x: Tensor) -> Tensor:
        kept = drop_infinities(x.float())
        ends = torch.stack((kept.amax(-1), -kept.amin(-1)))  # [2, ...]
        distributed.all_reduce(ends, distributed.ReduceOp.MAX)
        grid = form.compute_qparams(
            torch.stack((ends[0], -ends[1]), -1)[..., None, :], clip_ratio=clip
        )  # of [..., 1, 2]
        values = form.dequantize_groups(form.quantize_groups(form.split_groups(x), grid), grid)
        return values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    layer.round_inputs = rounded


def _summed(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    distributed.all_reduce(output)
    return output
