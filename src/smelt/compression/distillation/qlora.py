"""QLoRA: low-rank adapters that train on a packed, frozen base (Dettmers et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compression.base import METHODS, CalibrationSize, MethodContext, ResourceEstimate, UndecidedWidth, within
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.distillation.fake_quantize import FakeQuantizedLayer
from smelt.compression.distillation.quantizers import WeightQuantizer
from smelt.compression.distillation.quantizers.minmax import MinMax
from smelt.compression.distillation.teachers import DistilledTraining
from smelt.compression.quantization.adapters import Adapter
from smelt.errors import ModelError, RecipeError
from smelt.measure.cost import block_parameters
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.models.quantized import QuantizedConv, QuantizedLinear, quantized_layers
from smelt.models.quantized_network import replace_module
from smelt.train.trainer.config import OptimizerConfig, ScheduleConfig


@METHODS.register("qlora", paper="Dettmers et al., 2023 (QLoRA, arXiv 2305.14314)", needs=("calibration data",))
@dataclass(frozen=True)
class Qlora(DistilledTraining):
    """Use to fine-tune where the model and its optimizer do not fit: only low-rank adapters train, on packed weights.

    A model that is quantized already keeps its weights; another one is rounded to the format of `weights` first. The
    adapters are stored beside the weights. Scales are not quantized a second time, as the paper does.
    """

    weights: WeightQuantizer = field(default_factory=lambda: MinMax("nf4/64"))
    rank: int = 64  # of the adapters; alpha is 16
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-4, beta2=0.999))
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(name="constant"))
    max_grad_norm: float | None = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "rank", self.rank, 1, 65_536)
        if self.inputs is not None:
            raise RecipeError("qlora trains adapters of unquantized activations; remove `inputs`.")

    def check(self, anatomy: Anatomy) -> None:
        layers = quantized_layers(anatomy.network)
        if not layers:
            super().check(anatomy)
        self.check_teacher(anatomy)
        for path, layer in layers.items():
            if layer.scheme.rank:
                raise ModelError(f"{path} has low-rank adapters already; start from the model without them.")
            if isinstance(layer, QuantizedConv) or layer.inputs is not None or layer.scheme.hadamard:
                raise ModelError(f"{path} is no linear layer with quantized weights alone, which qlora needs.")

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        if not quantized_layers(anatomy.network):
            undecided = super().reshape(anatomy, undecided)
        for layer in quantized_layers(anatomy.network).values():
            layer.scheme = replace(layer.scheme, rank=min(self.rank, layer.in_features, layer.out_features))
        return undecided

    def bytes_change(self, anatomy: Anatomy) -> int:
        packed = 0 if quantized_layers(anatomy.network) else super().bytes_change(anatomy)
        return packed + 4 * self.added_parameters(anatomy)

    def added_parameters(self, anatomy: Anatomy) -> int:
        sizes = [tuple(layer.weight.shape) for layer in self._layers(anatomy)]
        return sum(min(self.rank, *size) * sum(size) for size in sizes)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        """Count adapters with gradients and optimizer, one dequantized layer at a time, and activations."""
        rest = sum(parameter.numel() for parameter in anatomy.network.parameters()) - block_parameters(anatomy)
        largest = max((layer.weight.numel() for layer in self._layers(anatomy)), default=0)
        trained = 4 * 4 * self.added_parameters(anatomy)
        memory = trained + 4 * (rest + largest) + gradient_bytes(anatomy, self.batch_size, size.seq_len)
        return ResourceEstimate(passes=self.epochs * (4 if self.needs_teacher else 3), memory=memory)

    def prepare_layers(self, model: Model, context: MethodContext) -> tuple[list[FakeQuantizedLayer], dict[str, Any]]:
        """Pack the weights unless they are packed, and add adapters: nothing else trains."""
        network = model.network.float()
        if not quantized_layers(network):
            for path in self._columns(model.anatomy):
                layer = FakeQuantizedLayer(network.get_submodule(path), path, self.weights)
                replace_module(network, path, layer.convert())
        network.requires_grad_(False)
        generator = torch.Generator().manual_seed(context.seed)
        layers: list[FakeQuantizedLayer] = []
        for path, packed in quantized_layers(network).items():
            layers.append(AdaptedLayer(packed, path, self.rank, generator))
            replace_module(network, path, layers[-1])
        return layers, {}

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        dtype = next(model.network.parameters()).dtype
        facts = super().apply(model, context)
        for layer in quantized_layers(model.network).values():
            layer.down, layer.up = layer.down.to(dtype), layer.up.to(dtype)
        bits = {layer.scheme.weight.bits for layer in quantized_layers(model.network).values()}
        return {**facts, "bits": max(bits)}


class AdaptedLayer(FakeQuantizedLayer):
    """A packed layer whose weights are fixed, with a low-rank adapter that trains."""

    def __init__(self, packed: QuantizedLinear, path: str, rank: int, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.path, self.packed = path, packed
        self.inputs, self.inputs_enabled, self.other_input_bits = None, False, None
        self.weight_learned, self.input_learned = nn.ParameterDict(), nn.ParameterDict()
        self.adapter = Adapter(packed, rank, pooled=False)
        self.adapter.init_gaussian(generator)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _PackedLinear.apply(x, self.packed)
        return product + self.adapter(x)

    def convert(self) -> QuantizedLinear:
        return self.adapter.add_to_layer(self.packed, torch.float32)


class _PackedLinear(torch.autograd.Function):
    """A linear layer that dequantizes its weights again in the backward pass instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight.to(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.weight.to(gradient.dtype), None
