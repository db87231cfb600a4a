"""Train quantizer parameters by block reconstruction: the loop that OmniQuant, FlexRound and EfficientQAT share.

The block runs in float32 with fake-quantized weights, on the outputs of the quantized blocks before it; its target is
the output of the original block. Parameters, gradients and optimizer state exist for one block at a time.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from smelt.compression.base import CalibrationSize, ResourceEstimate, within
from smelt.compression.quantization.base import BlockWork, Quantization
from smelt.compression.quantization.layers import LinearLayer
from smelt.compression.quantization.lfq import LogitLoss
from smelt.config import renamed
from smelt.errors import DataError, RecipeError
from smelt.kernels.linear import ActivationQuant
from smelt.measure.cost import block_parameters
from smelt.models.anatomy import Anatomy, Block
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.quantized_network import module_weight
from smelt.numerics.format import Format, QuantizedTensor, QuantParams
from smelt.numerics.gradient import straight_through
from smelt.numerics.integer import Integer

Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (output, target, mask) -> mean over the unmasked tokens
COPIES = 6  # float32 values per weight: the weight, its fake-quantized copy, parameter, gradient, two Adam moments


class Quantizer(nn.Module):
    """A quantized matrix with learned qparams. `forward` returns, bit for bit, the values that `result` packs."""

    grouped: Tensor
    trains_weight: ClassVar[bool] = False  # the weight itself is a parameter

    def __init__(self, weight: Tensor, number_format: Integer) -> None:
        super().__init__()
        self.format, self.columns = number_format, weight.shape[1]
        grouped = number_format.split_groups(weight.detach())  # [rows, groups, size]
        if self.trains_weight:
            self.grouped = nn.Parameter(grouped.clone())
        else:
            self.register_buffer("grouped", grouped)

    @abstractmethod
    def qparams(self) -> QuantParams:
        """Return the qparams as they will be stored, differentiable."""

    def divisor(self, scale: Tensor) -> Tensor:
        """Return what the weights are divided by before rounding."""
        return scale

    def codes(self, qparams: QuantParams) -> Tensor:
        """Return integer codes in float32; gradients pass straight through where nothing is clipped."""
        steps = self.grouped / self.divisor(qparams.scale)
        return (straight_through(steps, steps.round()) + self.format.zero_point(qparams)).clamp(0, self.format.qmax)

    def forward(self) -> Tensor:  # [rows, columns]
        qparams = self.qparams()
        values = (self.codes(qparams) - self.format.zero_point(qparams)) * qparams.scale
        return values.flatten(-2)[:, : self.columns]

    @torch.no_grad()
    def result(self) -> QuantizedTensor:
        """Return the quantized matrix as the layer will store it."""
        qparams = self.qparams()
        codes = self.codes(qparams).nan_to_num(nan=0.0).to(torch.uint8).flatten(-2)[:, : self.columns]
        return QuantizedTensor(
            self.format, codes, QuantParams(**{name: t.detach() for name, t in qparams.tensors().items()})
        )


@dataclass(frozen=True)
class LearnedQuantization(Quantization):
    """Train the parameters of a quantizer block by block. Each calibration batch is one update."""

    lr: float = renamed("rate", default=1e-2)  # of Adam
    lfq: bool = False  # fit the last block to the logits of the source model (LFQ) instead of its hidden states

    teacher: ClassVar[bool] = True
    any_format: ClassVar[bool] = False
    cosine: ClassVar[bool] = False  # cosine decay of the learning rate; false: constant
    min_lr_ratio: ClassVar[float] = 0.0  # fraction of the learning rate at which a cosine ends

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "lr", self.lr, 1e-8, 10.0)
        number_format = self.weight_format
        if type(number_format) is not Integer or number_format.zero_dtype != "code":
            raise RecipeError(f"{self.name} learns the grid of plain integers: use bits, group and symmetric instead.")

    @abstractmethod
    def quantizer(self, weight: Tensor, generator: torch.Generator) -> Quantizer:
        """Return the untrained quantizer of one matrix."""

    @abstractmethod
    def updates(self, batches: int) -> int:
        """Return the number of updates per block for this number of calibration batches."""

    def make_optimizer(self, quantizers: Iterable[Quantizer]) -> torch.optim.Optimizer:
        """Return the optimizer of a block's quantizers."""
        return torch.optim.Adam([p for quantizer in quantizers for p in quantizer.parameters()], lr=self.lr)

    @property
    def integer(self) -> Integer:
        number_format = self.weight_format
        assert isinstance(number_format, Integer)
        return number_format

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if self.lfq:
            LogitLoss.check(anatomy)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        """Count the hidden states twice (inputs and targets), plus the training of one block."""
        plain = super().estimate_resources(anatomy, size, memory_limit)
        batches = math.ceil(size.samples / size.batch_size)
        training = COPIES * 4 * block_parameters(anatomy) // len(anatomy.blocks)
        return ResourceEstimate(plain.passes + 1 + 3 * self.updates(batches) / batches, 2 * plain.memory + training)

    def quantize(self, work: BlockWork) -> None:
        # One generator per block, so that a resumed run draws the same numbers.
        generator = torch.Generator().manual_seed(work.context.seed + 1_000_003 * work.block.index)
        groups = work.groups
        quantizers = {layer: self.quantizer(layer.weight, generator) for group in groups for layer in group.layers}
        self._fit(work, quantizers, generator)
        for group in groups:
            work.replace_layers(group, [quantizers[layer].result() for layer in group.layers])

    def _fit(self, work: BlockWork, quantizers: Mapping[LinearLayer, Quantizer], generator: torch.Generator) -> None:
        """Minimize the block's loss with Adam; batches are shuffled in every epoch."""
        assert work.block_inputs is not None and work.targets is not None
        updates = self.updates(len(work.block_inputs))
        block = FakeQuantized(work.block, quantizers, self.input_format)
        loss_fn: Loss = (
            LogitLoss(anatomy_of(work.network), work.targets[0].device) if self._uses_logit_loss(work) else masked_mse
        )
        optimizer = self.make_optimizer(quantizers.values())
        rates = [group["lr"] for group in optimizer.param_groups]
        order: list[int] = []
        for update in work.context.progress.track(range(updates), f"block {work.block.index}"):
            order = order or torch.randperm(len(work.block_inputs), generator=generator).tolist()
            batch = order.pop()
            if self.cosine:
                decay = (1 + math.cos(math.pi * update / updates)) / 2
                for group, lr in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * decay)
            output = work.block_inputs.run(block, work.block.index, batch)
            loss = loss_fn(output, work.targets[batch].float(), work.block_inputs.masks[batch])
            if not bool(loss.isfinite()):
                raise DataError(
                    f"the loss of {work.block.path} is not a finite number: look for NaN in the weights and the "
                    f"calibration data, or lower the lr of {self.name}."
                )
            optimizer.zero_grad()
            # Sum over the tokens: with one parameter per weight, gradients of a mean would vanish in Adam's epsilon.
            (loss * output.shape[-2]).backward()
            optimizer.step()

    def _uses_logit_loss(self, work: BlockWork) -> bool:
        return self.lfq and work.is_last


def masked_mse(output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean squared error over the unmasked tokens."""
    squares = (output - target).square()
    return squares.mean() if mask is None else squares[mask].mean()


class FakeQuantized(nn.Module):
    """A block in float32 with fake-quantized weights. The original block is not modified."""

    def __init__(self, block: Block, quantizers: Mapping[LinearLayer, Quantizer], inputs: Format | None) -> None:
        super().__init__()
        names = {layer: f"{layer.path[len(block.path) + 1 :]}.weight" for layer in quantizers}
        self.block = block.module
        self.quantizers = [(names[layer], layer, quantizer) for layer, quantizer in quantizers.items()]
        self.inputs = None if inputs is None else ActivationQuant(inputs)
        tensors = {**dict(self.block.named_parameters()), **dict(self.block.named_buffers())}
        self.fixed = {name: to_float32(t.detach()) for name, t in tensors.items() if name not in names.values()}

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        weights = {}
        for name, layer, quantizer in self.quantizers:
            weights[name] = module_weight(layer.module, quantizer())
        with fake_quantized_inputs([layer.module for _, layer, _ in self.quantizers], self.inputs):
            return functional_call(
                self.block, {**self.fixed, **weights}, to_float32((hidden, *args)), to_float32(kwargs)
            )


@contextmanager
def fake_quantized_inputs(modules: list[nn.Module], inputs: ActivationQuant | None) -> Iterator[None]:
    """Fake-quantize the modules' inputs inside the context, with straight-through gradients."""

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert inputs is not None
        return (straight_through(args[0], inputs.fake_quantize(args[0].detach())), *args[1:])

    hooks = [] if inputs is None else [module.register_forward_pre_hook(before) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def to_float32(value: Any) -> Any:
    """Cast floating-point tensors, also in nested containers, to float32; leave everything else."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: to_float32(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_float32(item) for item in value)
    return value
