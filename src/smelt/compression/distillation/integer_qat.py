"""The short training of I-BERT: an encoder trains with the rounding of its integer graph, then becomes that graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from smelt.compression.base import METHODS, Batch, MethodContext, UndecidedWidth
from smelt.compression.calibration.ranges import observe_ranges
from smelt.compression.distillation.teachers import DistilledTraining
from smelt.errors import RecipeError
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.numerics.gradient import straight_through
from smelt.runtime.integer.conversion import DECODERS, VISION_TYPES, ActivationRange
from smelt.runtime.integer.debug import layer_sqnr
from smelt.runtime.integer.encoders import check_encoder, convert_encoder, observed_modules
from smelt.runtime.integer.graph import IntegerGraph
from smelt.runtime.integer.network import IntegerNetwork
from smelt.train.trainer.config import OptimizerConfig

_CALIBRATION_BATCHES = 16


@METHODS.register("integer-qat", paper="Kim et al., 2021 (I-BERT, arXiv 2101.01321)", needs=("calibration data",))
@dataclass(frozen=True)
class IntegerQat(DistilledTraining):
    """Use if `integer-only` loses quality: trains an encoder briefly with its integer rounding before it converts it.

    Weights and the int8 activations are rounded as in the integer graph, with gradients straight through; ranges are
    frozen before training. Nonlinear functions train in float: their integer forms differ far less than int8 rounds.
    With a teacher there is no dropout: its noise is many times what the rounding changes, and training would fit it.
    """

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5, beta2=0.98, epsilon=1e-6))

    last: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inputs is not None or self.weights != type(self.weights)() or self.exclude:
            raise RecipeError(
                f"{self.name} rounds as its integer graph does; remove `weights`, `inputs` and `exclude`."
            )

    def check(self, anatomy: Anatomy) -> None:
        kind = anatomy.network.config.model_type
        if kind in (*DECODERS, *VISION_TYPES):
            raise RecipeError(f"integer-qat trains encoders of text, not {kind} networks; use integer-only.")
        check_encoder(anatomy.network)
        self.check_teacher(anatomy)

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        return undecided

    @property
    def input_multiple(self) -> int:
        return 1

    def targets(self) -> dict[str, float]:
        return {"bits": 8}

    def bytes_change(self, anatomy: Anatomy) -> int:
        return -3 * sum(layer.weight.numel() for layer in self._layers(anatomy))

    def prepare_layers(self, model: Model, context: MethodContext) -> tuple[Sequence[nn.Module], dict[str, Any]]:
        """Round weights, inputs and outputs of the linear layers at the scales of a graph converted before training."""
        network = model.network.float().eval()
        if self.needs_teacher:
            for module in network.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        network.smelt_ranges = _ranges(model, context)  # frozen, and used again after training
        return _round_layers(network, convert_encoder(network, network.smelt_ranges)), {}

    @torch.no_grad()
    def convert_layers(self, model: Model, context: MethodContext, first: Batch) -> dict[str, Any]:
        """Remove the rounding from the float layers, and convert the network with the ranges it trained with."""
        network, device = model.network, model.device
        rounded = network(**first).logits
        ranges = _merge(network.smelt_ranges, _ranges(model, context), network)
        _stop_rounding(network)
        graph = convert_encoder(network, ranges)
        rows = layer_sqnr(network.cpu(), graph, context.batches[:1])
        model.network = IntegerNetwork(graph, network).to(device)
        difference = (model.network(**first).logits - rounded).abs().max() / rounded.abs().max().clamp(min=1e-12)
        return {
            "bits": 8,
            "nodes": len(graph.nodes),
            "logit_difference": float(difference),
            "sqnr_db": {f"{row.layer} ({row.op})": round(row.decibels, 1) for row in rows},
        }


class RoundedWeight(nn.Module):
    """Rounds a weight [out, in] to int8 per row, after the input's scales are folded into it."""

    def __init__(self, input_scale: Tensor) -> None:
        super().__init__()
        self.input_scale = nn.Buffer(input_scale, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        folded = weight.detach() * self.input_scale
        scale = (folded.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
        return straight_through(weight, (folded / scale).round() * scale / self.input_scale)


class RoundedActivation(nn.Module):
    """Rounds activations to int8 by static scales, [1] or [channels]."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = nn.Buffer(scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return straight_through(x, (x.detach() / self.scale).round().clamp(-127, 127) * self.scale)


def _ranges(model: Model, context: MethodContext) -> dict[str, ActivationRange]:
    network = model.network
    return observe_ranges(network, observed_modules(network), context.batches[:_CALIBRATION_BATCHES], context.progress)


def _merge(
    frozen: Mapping[str, ActivationRange], trained: Mapping[str, ActivationRange], network: nn.Module
) -> dict[str, ActivationRange]:
    """Keep the frozen ranges of int8 activations; those of wider integers follow the training."""
    merged = {}
    for path, old in frozen.items():
        layer, new = network.get_submodule(path), trained[path]
        if isinstance(layer, nn.LayerNorm):
            merged[path] = ActivationRange(new.inputs, old.outputs)
        else:
            merged[path] = ActivationRange(old.inputs, old.outputs if hasattr(layer, "rounded_output") else new.outputs)
    return merged


def _round_layers(network: nn.Module, graph: IntegerGraph) -> list[nn.Module]:
    """Round where the graph does: the inputs and weights of linear layers, and the outputs that become int8."""
    device, rounded = next(network.parameters()).device, []
    readers = {node.inputs[0]: node for node in graph.nodes if node.op == "requantize" and node.dtype == "int8"}
    for node in (node for node in graph.nodes if node.op == "linear"):
        layer = network.get_submodule(node.layer)
        scale = _tensor(graph, node.inputs[0], device)
        layer.rounded_input = RoundedActivation(scale)
        layer.register_forward_pre_hook(_round_input)
        parametrize.register_parametrization(layer, "weight", RoundedWeight(scale))
        if (reader := readers.get(node.output)) is not None and reader.attributes["minimum"] != 0:
            layer.rounded_output = RoundedActivation(_tensor(graph, reader.output, device))
            layer.register_forward_hook(_round_output)
        rounded.append(layer)
    return rounded


def _stop_rounding(network: nn.Module) -> None:
    """Undo `_round_layers`, keeping the trained weights."""
    for layer in network.modules():
        if hasattr(layer, "rounded_input"):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
            layer._forward_pre_hooks.clear()
            layer._forward_hooks.clear()
            del layer.rounded_input
            if hasattr(layer, "rounded_output"):
                del layer.rounded_output


def _round_input(layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (layer.rounded_input(args[0]), *args[1:])


def _round_output(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    rounded: Tensor = layer.rounded_output(output)
    return rounded


def _tensor(graph: IntegerGraph, name: str, device: torch.device) -> Tensor:
    return torch.tensor(graph.scales[name], dtype=torch.float32, device=device)
