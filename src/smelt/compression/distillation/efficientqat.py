"""EfficientQAT: train blocks one after the other, then the step sizes end to end (Chen et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compression.base import METHODS, CalibrationSize, MethodContext, ResourceEstimate, within
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.distillation.fake_quantize import FakeQuantizedLayer
from smelt.compression.distillation.quantizers import WeightQuantizer
from smelt.compression.distillation.quantizers.minmax import MinMax
from smelt.compression.distillation.teachers import DistilledTraining
from smelt.compression.quantization.learned import LearnedQuantization, Quantizer
from smelt.errors import RecipeError
from smelt.measure.cost import block_parameters
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.models.quantized_network import replace_module
from smelt.numerics.format import QuantizedTensor, QuantParams
from smelt.numerics.gradient import straight_through
from smelt.numerics.integer import Integer
from smelt.train.trainer.config import OptimizerConfig

_MIN_SCALE = 1e-4  # of the published code


@METHODS.register(
    "efficientqat", paper="Chen et al., 2025 (EfficientQAT, arXiv 2407.11062)", needs=("calibration data",)
)
@dataclass(frozen=True)
class EfficientQat(DistilledTraining):
    """Use for 2 to 4-bit weights where training a whole network with its optimizer does not fit in memory.

    First weights, scales and zero points of one block at a time, to reproduce its output (Block-AP); then, with the
    codes fixed, the scales of all blocks end to end (E2E-QP). Defaults are those of the published code for 2 bits,
    which trains on 4,096 samples of 2,048 tokens in batches of 2 (`data` of the recipe). Norms stay as they are.
    """

    weights: WeightQuantizer = field(default_factory=lambda: MinMax("int2-asym/64@float16"))  # the initial grid
    block_epochs: int = 2  # over the calibration data, per block; 0: round to nearest
    block_lr: float = 2e-5  # of weights, with cosine decay to a twentieth; 1e-5 for 3 and 4 bits
    block_qparams_lr: float = 1e-4  # of scales and zero points
    epochs: float = 1.0  # end to end, over the samples of the recipe's data
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-5))  # 1e-5 for 3 and 4 bits
    max_grad_norm: float | None = 0.3  # end to end

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "block_epochs", self.block_epochs, 0, 10_000)
        within(self.name, "block_lr", self.block_lr, 1e-8, 1.0)
        within(self.name, "block_qparams_lr", self.block_qparams_lr, 0.0, 1.0)
        number_format = self.weights.format
        if not isinstance(self.weights, MinMax) or type(number_format) is not Integer:
            raise RecipeError(
                "efficientqat learns the grid of plain integers: give `weights: {quantizer: minmax, weight_format: "
                "int2-asym/64@float16}`."
            )
        if self.inputs is not None or self.exclude:
            key = "inputs" if self.inputs is not None else "exclude"
            raise RecipeError(f"efficientqat quantizes the weights of all layers of the blocks; remove `{key}`.")
        self.block_method  # noqa: B018  (built to be checked)

    @property
    def block_method(self) -> BlockAp:
        assert isinstance(self.weights, MinMax)
        return BlockAp(
            format=self.weights.weight_format, lr=self.block_lr, qparams_lr=self.block_qparams_lr,
            epochs=self.block_epochs,
        )  # fmt: skip

    def prepare_layers(self, model: Model, context: MethodContext) -> tuple[list[FakeQuantizedLayer], dict[str, Any]]:
        """Quantize block by block, and let nothing but step sizes train from then on."""
        facts = self.block_method.apply(model, context)
        network = model.network.float().requires_grad_(False)
        layers: list[FakeQuantizedLayer] = []
        for path, packed in quantized_layers(network).items():
            layers.append(StepSizeLayer(packed, path))
            replace_module(network, path, layers[-1])
        return layers, {name: facts[name] for name in ("bits_per_weight", "layers")}

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        """Count the phase that takes more memory; end to end, the network in float32, its codes and its activations."""
        blocks = self.block_method.estimate_resources(anatomy, size, memory_limit)
        network = 4 * sum(parameter.numel() for parameter in anatomy.network.parameters())
        memory = network + 5 * block_parameters(anatomy) + gradient_bytes(anatomy, self.batch_size, size.seq_len)
        passes = blocks.passes + self.epochs * (4 if self.needs_teacher else 3)
        return ResourceEstimate(passes, max(blocks.memory, memory))


@dataclass(frozen=True)
class BlockAp(LearnedQuantization):
    """The first phase: train all parameters of a block."""

    name: ClassVar[str] = EfficientQat.name
    needs: ClassVar[tuple[str, ...]] = ("calibration data",)
    cosine: ClassVar[bool] = True
    min_lr_ratio: ClassVar[float] = 1 / 20

    epochs: int = 2
    qparams_lr: float = 1e-4

    def quantizer(self, weight: Tensor, generator: torch.Generator) -> Quantizer:
        return TrainedWeight(weight, self.integer)

    def updates(self, batches: int) -> int:
        return self.epochs * batches

    def make_optimizer(self, quantizers: Iterable[Quantizer]) -> torch.optim.Optimizer:
        named = [pair for quantizer in quantizers for pair in quantizer.named_parameters()]
        weights = [parameter for name, parameter in named if name == "grouped"]
        qparams = [parameter for name, parameter in named if name != "grouped"]
        groups = [{"params": weights, "lr": self.lr}, {"params": qparams, "lr": self.qparams_lr}]
        return torch.optim.AdamW(groups, weight_decay=0.0)


class TrainedWeight(Quantizer):
    """A quantizer of which weight, scales and zero points train; they start from the smallest and largest weight."""

    trains_weight: ClassVar[bool] = True

    def __init__(self, weight: Tensor, number_format: Integer) -> None:
        super().__init__(weight, number_format)
        qparams = number_format.compute_qparams(self.grouped.detach())
        self.scale = nn.Parameter(qparams.scale)  # [rows, groups, 1]
        self.zero = None if qparams.zero is None else nn.Parameter(qparams.zero)

    def qparams(self) -> QuantParams:
        scale = straight_through(self.scale, self.format.round_scale(self.scale.detach().clamp(min=_MIN_SCALE)))
        if self.zero is None:
            return QuantParams(scale)
        return QuantParams(scale, straight_through(self.zero, self.format.round_zero(self.zero.detach())))


class StepSizeLayer(FakeQuantizedLayer):
    """A quantized layer of which only the scales train: codes and zero points are fixed."""

    codes: Tensor
    zero: Tensor | None

    def __init__(self, packed: QuantizedLinear, path: str) -> None:
        nn.Module.__init__(self)
        quantized = packed.packed.unpack()
        number_format, qparams = quantized.format, quantized.qparams
        assert isinstance(number_format, Integer)
        self.path, self.scheme, self.format = path, packed.scheme, number_format
        self.inputs, self.inputs_enabled, self.other_input_bits = None, False, None
        self.columns, self.bias = packed.in_features, packed.bias
        self.register_buffer("codes", quantized.codes)  # uint8 [out, in]
        self.register_buffer("zero", qparams.zero)  # [out, groups, 1]; None: symmetric
        self.weight_learned = nn.ParameterDict({"scale": qparams.scale.clone()})
        self.input_learned = nn.ParameterDict()

    def qparams(self) -> QuantParams:
        """Return the parameters as they are stored, differentiable."""
        scale = self.weight_learned["scale"]
        rounded = self.format.round_scale(scale.detach().clamp(min=_MIN_SCALE))
        return QuantParams(straight_through(scale, rounded), self.zero)

    def forward(self, x: Tensor) -> Tensor:
        size = self.format.effective_group_size(self.columns)
        grouped = F.pad(self.codes, (0, -self.columns % size)).unflatten(-1, (-1, size))
        weight = self.format.dequantize_groups(grouped, self.qparams()).flatten(-2)[:, : self.columns]
        return F.linear(x, weight.to(x.dtype), self.bias)

    def convert(self) -> QuantizedLinear:
        qparams = QuantParams(**{name: tensor.detach() for name, tensor in self.qparams().tensors().items()})
        quantized = QuantizedTensor(self.format, self.codes, qparams)
        return QuantizedLinear.from_quantized(quantized, self.scheme, bias=self.bias, dtype=torch.float32)
