"""The cost of a network in parameters, bytes and multiply-accumulates (MACs), in total and per unit of each part.

MACs are counted as usual (Kwon et al., 2022): projections and both attention matmuls of the blocks, without embeddings,
norms, routers, pooler and head. Causal attention counts half of the matmuls. Of a mixture only the top-k experts count,
assuming balanced routing. Low-rank factors of a quantized layer count like other matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from smelt.models.anatomy import Anatomy, Part, Projection
from smelt.models.implanted_layers import ImplantedConv2d
from smelt.models.program_network import ProgramNetwork
from smelt.models.quantized import QuantizedConv, QuantizedLinear, quantized_layers
from smelt.models.quantized_network import tied_layers

_CONVOLUTIONS = (nn.Conv2d, QuantizedConv)

CostMetric = Literal["parameters", "macs", "bytes"]


@dataclass(frozen=True)
class Workload:
    """The workload of the cost model: `tokens` per sequence; `context` and `batch` for the bytes of decoding."""

    tokens: int = 128
    context: int = 1024
    batch: int = 1
    image_size: int = 224


def count_parameters(network: nn.Module) -> int:
    """Count all parameters, shared ones once; of one that runs a program, those of its outline."""
    if isinstance(network, ProgramNetwork):
        return count_parameters(network.outline)
    tied = tied_layers(network)
    packed = sum(layer.parameter_count for path, layer in quantized_layers(network).items() if path not in tied)
    return packed + sum(parameter.numel() for parameter in network.parameters())


def count_bytes(network: nn.Module) -> int:
    """Count the bytes of all weights, shared tensors once; of one that runs a program, those of its constants."""
    if isinstance(network, ProgramNetwork):
        return sum(tensor.numel() * tensor.element_size() for tensor in network.buffers())
    stored: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in network.parameters()}
    for layer in quantized_layers(network).values():
        stored |= {id(tensor): tensor for tensor in layer.buffers()}
    return sum(tensor.numel() * tensor.element_size() for tensor in stored.values())


def block_parameters(anatomy: Anatomy) -> int:
    """Count the parameters in the blocks, including norms and biases."""
    return sum(count_parameters(block.module) for block in anatomy.blocks)


def active_parameters(anatomy: Anatomy) -> float:
    """Count the parameters in the blocks that one token uses: of a mixture, those of its top-k experts."""
    idle = [
        (1 - part.token_fraction) * (part.units * unit_parameters(part) + shared_factors(part))
        for part in anatomy.parts
    ]
    return block_parameters(anatomy) - sum(idle)


def unit_parameters(part: Part) -> int:
    """Count the parameters removed with one unit."""
    total = 0
    for projection, rows in zip(part.input_projections, part.rows_per_unit, strict=True):
        total += rows * (
            projection.in_features * projection.kernel_elements + _rank(projection) + (projection.bias is not None)
        )
    if part.norm is not None:
        total += 2
    total += _head_parameters(part)
    return total + (
        part.columns_per_unit * (part.output.out_features * part.output.kernel_elements + _rank(part.output))
        if part.units
        else 0
    )


def _head_parameters(part: Part) -> int:
    """Count the parameters of one head outside its projections, such as persistent vectors."""
    return sum(parameter.shape[1:].numel() for parameter in part.head_parameters)


def shared_factors(part: Part) -> int:
    """Count the parameters of low-rank factors that are not removed with any unit: `down` of the input projections and
    `up` of the output projection."""
    if not part.units:
        return 0
    input_factors = {id(source.module): _rank(source) * source.in_features for source in part.input_projections}
    return sum(input_factors.values()) + _rank(part.output) * part.output.out_features


def _rank(projection: Projection) -> int:
    return projection.module.scheme.rank if isinstance(projection.module, QuantizedLinear) else 0


def unit_macs(part: Part, workload: Workload, causal: bool, positions: tuple[int, int] = (1, 1)) -> float:
    """Count the MACs removed with one unit, for one sequence or image.

    `positions`: the output positions of the input and output convolution.
    """
    if not part.units:
        return 0.0
    if part.kind == "channels":
        projection, output = part.input_projections[0].weight, part.output.weight
        return float(projection[0].numel() * positions[0] + output[:, 0].numel() * positions[1])
    tokens = workload.tokens
    projections_and_rows = zip(part.input_projections, part.rows_per_unit, strict=True)
    projections = sum(rows * (projection.in_features + _rank(projection)) for projection, rows in projections_and_rows)
    projections += part.columns_per_unit * (part.output.out_features + _rank(part.output))
    projections += _head_parameters(part)  # each is multiplied once per token or position
    matmuls = 0 if part.kind != "heads" else 2 if part.map_of is None else 1  # scores and values, or only values
    matmuls += part.attention is not None and part.attention.relative
    products = matmuls * part.columns_per_unit * tokens * tokens * (0.5 if causal else 1.0)
    return tokens * part.token_fraction * projections + products


def shared_macs(part: Part, workload: Workload) -> float:
    """Count the MACs of a part for one sequence that are not removed with any unit."""
    return workload.tokens * (part.token_fraction * shared_factors(part) + implant_parameters(part))


def implant_parameters(part: Part) -> int:
    """Count the parameters of a low-rank implant beside attention or a feed-forward."""
    if part.kind == "channels" or part.implant is None:
        return 0
    return sum(count_parameters(factor) for factor in part.implant.factors)


def unit_bytes(part: Part, workload: Workload) -> float:
    """Count the bytes that decoding one token reads for one unit: its weights and its share of the KV cache.

    An expert is read if any sequence of the batch is routed to it. Layers must be unquantized: others are not pruned
    under a budget.
    """
    if not part.units:
        return 0.0
    size = part.output.weight.element_size()
    tensors = 0 if part.kind != "heads" else 2 if part.map_of is None else 1  # K and V, or only V
    cache = tensors * part.head_dim * workload.context * workload.batch * size
    read = 1 - (1 - part.token_fraction) ** workload.batch
    return float(read * unit_parameters(part) * size + cache)


def unit_costs(anatomy: Anatomy, measure: CostMetric, workload: Workload) -> list[float]:
    """Return the cost of one unit of every part."""
    if measure == "parameters":
        return [float(unit_parameters(part)) for part in anatomy.parts]
    if measure == "bytes":
        return [unit_bytes(part, workload) for part in anatomy.parts]
    causal, positions = anatomy.family.causal, channel_positions(anatomy, workload)
    return [
        unit_macs(part, workload, causal, position) for part, position in zip(anatomy.parts, positions, strict=True)
    ]


def block_cost(anatomy: Anatomy, measure: CostMetric, workload: Workload) -> float:
    """Return the current cost of the blocks."""
    return cost_with_units(anatomy, [part.units for part in anatomy.parts], measure, workload)


def cost_with_units(anatomy: Anatomy, counts: Sequence[int], measure: CostMetric, workload: Workload) -> float:
    """Return the cost of the blocks with `counts` units in each part, including norms and biases."""
    if _has_channels(anatomy):
        return _convolution_cost(anatomy, counts, measure, workload)
    costs = unit_costs(anatomy, measure, workload)
    units = sum(unit_cost * count for unit_cost, count in zip(costs, counts, strict=True))
    others = [layer for block in anatomy.blocks for layer in block.other_layers]
    if measure == "macs":
        fixed = sum(workload.tokens * layer.in_features * layer.out_features for layer in others)
        return units + fixed + sum(shared_macs(part, workload) for part in anatomy.parts)
    if measure == "bytes":
        implants = sum(
            implant_parameters(part) * part.implant.up.weight.element_size()
            for part in anatomy.parts
            if implant_parameters(part)
        )
        return units + implants + sum(count_bytes(layer.module) for layer in others)
    current = sum(unit_cost * part.units for unit_cost, part in zip(costs, anatomy.parts, strict=True))
    return block_parameters(anatomy) - current + units


def block_macs(anatomy: Anatomy, workload: Workload) -> float:
    return block_cost(anatomy, "macs", workload)


def _has_channels(anatomy: Anatomy) -> bool:
    return any(part.kind == "channels" for part in anatomy.parts)


def channel_positions(anatomy: Anatomy, workload: Workload) -> list[tuple[int, int]]:
    """Return the output positions of the input and output convolution of each part; (1, 1) for other parts."""
    if not _has_channels(anatomy):
        return [(1, 1)] * len(anatomy.parts)
    sizes = _output_positions(anatomy, workload)
    return [(sizes[id(part.input_projections[0].module)], sizes[id(part.output.module)]) for part in anatomy.parts]


def _convolution_cost(anatomy: Anatomy, counts: Sequence[int], measure: CostMetric, workload: Workload) -> float:
    """Compute the cost per convolution: adjacent parts share one, so costs per unit would count it twice."""
    return float(evaluate_cost(convolution_cost_terms(anatomy, measure, workload), counts))


@dataclass(frozen=True)
class CostTerm:
    """A coefficient that is multiplied by the units of each of these parts, given by their positions."""

    coefficient: float
    parts: tuple[int, ...] = ()


def convolution_cost_terms(anatomy: Anatomy, measure: CostMetric, workload: Workload) -> list[CostTerm]:
    """Return the cost of a network of convolutions as a sum of terms in the units of its parts."""
    outputs = {id(part.input_projections[0].module): index for index, part in enumerate(anatomy.parts)}
    inputs = {id(part.output.module): index for index, part in enumerate(anatomy.parts)}
    positions = _output_positions(anatomy, workload) if measure == "macs" else {}
    size = anatomy.parts[0].output.weight.element_size() if measure == "bytes" else 1
    rest = 0.0 if measure == "macs" else float(block_parameters(anatomy))  # what no term below covers
    terms = []
    for module in (m for block in anatomy.blocks for m in block.module.modules() if isinstance(m, _CONVOLUTIONS)):
        rows, columns, *kernel = _weight_shape(module)
        rest -= 0.0 if measure == "macs" else rows * columns * math.prod(kernel)
        coefficient = math.prod(kernel) * (positions[id(module)] if measure == "macs" else size)
        parts = tuple(index[id(module)] for index in (outputs, inputs) if id(module) in index)
        coefficient *= (1 if id(module) in outputs else rows) * (1 if id(module) in inputs else columns)
        terms.append(CostTerm(float(coefficient), parts))
    if measure != "macs":  # the norms of the channels
        terms += [CostTerm(2.0 * size, (index,)) for index in range(len(anatomy.parts))]
        rest -= sum(2 * part.units for part in anatomy.parts)
    return [*terms, CostTerm(rest * size)]


def evaluate_cost(terms: Sequence[CostTerm], counts: Sequence[Any]) -> Any:
    """Return the sum of the terms with `counts` units in each part: numbers, or tensors [] to differentiate."""
    return sum(term.coefficient * math.prod(counts[part] for part in term.parts) for term in terms)


def _weight_shape(convolution: nn.Module) -> tuple[int, ...]:
    """Return the shape of the weight: [out channels, in channels per group, height, width]."""
    if isinstance(convolution, QuantizedConv):
        return convolution.shape.weight_shape
    weight: torch.Tensor = convolution.weight  # type: ignore[assignment]
    return tuple(weight.shape)


@torch.no_grad()
def _output_positions(anatomy: Anatomy, workload: Workload) -> dict[int, int]:
    """Measure output height x width of every convolution with one forward of one image."""
    sizes: dict[int, int] = {}

    def record_size(module: nn.Module, args: object, output: torch.Tensor) -> None:
        sizes[id(module)] = output.shape[-2] * output.shape[-1]

    hooks = [
        module.register_forward_hook(record_size)
        for module in anatomy.network.modules()
        if isinstance(module, (*_CONVOLUTIONS, ImplantedConv2d))
    ]
    parameter = next(anatomy.network.parameters())
    image = torch.zeros(
        1, anatomy.network.config.num_channels, workload.image_size, workload.image_size,
        device=parameter.device, dtype=parameter.dtype,
    )  # fmt: skip
    try:
        anatomy.network(pixel_values=image)
    finally:
        for hook in hooks:
            hook.remove()
    return sizes
