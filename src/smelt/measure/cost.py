"""What a network costs: parameters, bytes and multiply-accumulates, in all and for one unit of each part.

MACs follow the usual count (Kwon et al., 2022): projections and both attention products of the blocks; embeddings,
norms, routers, pooler and head are not counted. A causal attention needs half of the products. Of a mixture only the
experts that are chosen for a token count, as if the router spread the tokens evenly. Low-rank factors beside a
quantized layer count like any other matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from smelt.models.anatomy import Anatomy, Part, Projection
from smelt.models.quantized import QuantizedLinear, quantized_layers

CostMetric = Literal["parameters", "macs", "bytes"]


@dataclass(frozen=True)
class Workload:
    """The work that costs are counted for: `tokens` a sequence; for decoded bytes also the context and the batch."""

    tokens: int = 128
    context: int = 1024
    batch: int = 1
    image_size: int = 224


def count_parameters(network: nn.Module) -> int:
    """All parameters, shared ones once."""
    packed = sum(layer.parameter_count for layer in quantized_layers(network).values())
    return packed + sum(parameter.numel() for parameter in network.parameters())


def count_bytes(network: nn.Module) -> int:
    """Bytes of everything the network must remember, shared tensors once."""
    held: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in network.parameters()}
    for layer in quantized_layers(network).values():
        held |= {id(tensor): tensor for tensor in layer.buffers()}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def block_parameters(anatomy: Anatomy) -> int:
    """Parameters inside the blocks, norms and biases included."""
    return sum(count_parameters(block.module) for block in anatomy.blocks)


def active_parameters(anatomy: Anatomy) -> float:
    """Parameters inside the blocks that one token passes through: of a mixture, those of the experts chosen for it."""
    idle = [
        (1 - part.token_fraction) * (part.units * unit_parameters(part) + shared_factors(part))
        for part in anatomy.parts
    ]
    return block_parameters(anatomy) - sum(idle)


def unit_parameters(part: Part) -> int:
    """Parameters that leave with one unit."""
    total = 0
    for writer, span in zip(part.input_projections, part.rows_per_unit, strict=True):
        total += span * (writer.in_features * writer.kernel_elements + _rank(writer) + (writer.bias is not None))
    if part.norm is not None:
        total += 2
    return total + (
        part.columns_per_unit * (part.output.out_features * part.output.kernel_elements + _rank(part.output))
        if part.units
        else 0
    )


def shared_factors(part: Part) -> int:
    """Parameters of low-rank factors that no unit takes along: those that read a writer's inputs, and those that write
    the part's outputs."""
    if not part.units:
        return 0
    writers = {id(writer.module): _rank(writer) * writer.in_features for writer in part.input_projections}
    return sum(writers.values()) + _rank(part.output) * part.output.out_features


def _rank(projection: Projection) -> int:
    return projection.module.scheme.rank if isinstance(projection.module, QuantizedLinear) else 0


def unit_macs(part: Part, workload: Workload, causal: bool, positions: tuple[int, int] = (1, 1)) -> float:
    """MACs that leave with one unit, for one sequence, or one image given the output positions of writer and reader."""
    if not part.units:
        return 0.0
    if part.kind == "channels":
        writer, output = part.input_projections[0].weight, part.output.weight
        return float(writer[0].numel() * positions[0] + output[:, 0].numel() * positions[1])
    tokens = workload.tokens
    writers = zip(part.input_projections, part.rows_per_unit, strict=True)
    projections = sum(span * (writer.in_features + _rank(writer)) for writer, span in writers)
    projections += part.columns_per_unit * (part.output.out_features + _rank(part.output))
    products = 2 * part.columns_per_unit * tokens * tokens * (0.5 if causal else 1.0) if part.kind == "heads" else 0.0
    return tokens * part.token_fraction * projections + products


def shared_macs(part: Part, workload: Workload) -> float:
    """MACs of a part for one sequence that no unit takes along."""
    return workload.tokens * part.token_fraction * shared_factors(part)


def unit_bytes(part: Part, workload: Workload) -> float:
    """Bytes that decoding one token need not read without this unit: its weights and its share of the cache. An expert
    is read if any sequence of the batch chooses it. Of plain layers: under a budget no others are cut."""
    if not part.units:
        return 0.0
    size = part.output.weight.element_size()
    cache = 2 * part.head_dim * workload.context * workload.batch * size if part.kind == "heads" else 0
    read = 1 - (1 - part.token_fraction) ** workload.batch
    return float(read * unit_parameters(part) * size + cache)


def unit_costs(anatomy: Anatomy, measure: CostMetric, workload: Workload) -> list[float]:
    """The price of one unit of every part."""
    if measure == "parameters":
        return [float(unit_parameters(part)) for part in anatomy.parts]
    if measure == "bytes":
        return [unit_bytes(part, workload) for part in anatomy.parts]
    causal, positions = anatomy.family.causal, channel_positions(anatomy, workload)
    return [unit_macs(part, workload, causal, place) for part, place in zip(anatomy.parts, positions, strict=True)]


def block_cost(anatomy: Anatomy, measure: CostMetric, workload: Workload) -> float:
    """What the blocks cost as they are now."""
    return cost_with_units(anatomy, [part.units for part in anatomy.parts], measure, workload)


def cost_with_units(anatomy: Anatomy, counts: Sequence[int], measure: CostMetric, workload: Workload) -> float:
    """What the blocks would cost with so many units left in each part, norms and biases included."""
    if _has_channels(anatomy):
        return _convolution_cost(anatomy, counts, measure, workload)
    prices = unit_costs(anatomy, measure, workload)
    units = sum(price * count for price, count in zip(prices, counts, strict=True))
    if measure == "macs":
        return units + sum(shared_macs(part, workload) for part in anatomy.parts)
    if measure == "bytes":
        return units
    present = sum(price * part.units for price, part in zip(prices, anatomy.parts, strict=True))
    return block_parameters(anatomy) - present + units


def block_macs(anatomy: Anatomy, workload: Workload) -> float:
    return block_cost(anatomy, "macs", workload)


def _has_channels(anatomy: Anatomy) -> bool:
    return any(part.kind == "channels" for part in anatomy.parts)


def channel_positions(anatomy: Anatomy, workload: Workload) -> list[tuple[int, int]]:
    """For convolution parts, how many output positions the writer and the reader have; (1, 1) for all others."""
    if not _has_channels(anatomy):
        return [(1, 1)] * len(anatomy.parts)
    sizes = _output_positions(anatomy, workload)
    return [(sizes[id(part.input_projections[0].module)], sizes[id(part.output.module)]) for part in anatomy.parts]


def _convolution_cost(anatomy: Anatomy, counts: Sequence[int], measure: CostMetric, workload: Workload) -> float:
    """Neighboring parts share a convolution, so its cost is a product: prices a unit would count it twice."""
    outputs = {id(p.input_projections[0].module): count for p, count in zip(anatomy.parts, counts, strict=True)}
    inputs = {id(p.output.module): count for p, count in zip(anatomy.parts, counts, strict=True)}
    positions = _output_positions(anatomy, workload) if measure == "macs" else {}
    total = 0.0 if measure == "macs" else float(block_parameters(anatomy))
    for module in (m for block in anatomy.blocks for m in block.module.modules() if isinstance(m, nn.Conv2d)):
        rows, columns = module.weight.shape[:2]
        left = outputs.get(id(module), rows) * inputs.get(id(module), columns) * module.weight[0, 0].numel()
        total += left * positions[id(module)] if measure == "macs" else left - module.weight.numel()
    if measure != "macs":  # the norms behind what was cut
        total -= sum(2 * (part.units - count) for part, count in zip(anatomy.parts, counts, strict=True))
    return total if measure != "bytes" else total * anatomy.parts[0].output.weight.element_size()


@torch.no_grad()
def _output_positions(anatomy: Anatomy, workload: Workload) -> dict[int, int]:
    """Output height x width of every convolution, from one forward of one image."""
    sizes: dict[int, int] = {}

    def note(module: nn.Module, args: object, output: torch.Tensor) -> None:
        sizes[id(module)] = output.shape[-2] * output.shape[-1]

    hooks = [
        module.register_forward_hook(note) for module in anatomy.network.modules() if isinstance(module, nn.Conv2d)
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
