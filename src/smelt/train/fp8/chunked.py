"""FP8 training with 16-bit accumulators, emulated to the bit (Wang et al., 2018, arXiv:1812.08011).

- Operands of GEMMs are FP8 (1,5,2); the network's input and all operands of the last layer are FP16 (1,6,9).
- A GEMM adds its exact products in FP16, in chunks: 64 products on their own first, then the sums of the chunks.
- Other layers return FP16. What a network computes between its layers (residual additions, attention) is float32.
- Weights are FP16 and updated with stochastic rounding (`smelt.train.fp8.optimizer`); the loss is scaled by 1000.

It answers what a cheaper accumulator would do to training, and is orders of magnitude slower than a GEMM.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from smelt.errors import ModelError
from smelt.kernels.emulated_gemm import emulated_matmul, round_to
from smelt.numerics.float_format import DLFLOAT16, FP8_E5M2_IBM, FloatFormat
from smelt.numerics.variance_retention import min_accumulator_bits
from smelt.train.fp8.layers import (
    LowPrecisionGemm,
    LowPrecisionTraining,
    first_and_last,
    gemm_layers,
    output_size,
    to_images,
    unfold,
    unsupported,
)
from smelt.train.fp8.settings import ChunkedSettings

FP8, FP16 = FP8_E5M2_IBM, DLFLOAT16
PRODUCT_BITS = 2 * FP8.mantissa_bits + 1


@torch.library.custom_op("smelt::chunked_gemm", mutates_args=())
def chunked_gemm(
    a: torch.Tensor, b: torch.Tensor, accumulator_bits: int, chunk_size: int, fp8_operands: bool
) -> torch.Tensor:
    """Multiply a [m, n] by the transpose of b [k, n], rounded operands in float32; `chunk_size` 0: no chunks.

    An operator of its own, so that its FLOPs can be counted.
    """
    accumulator = FloatFormat(FP16.exponent_bits, accumulator_bits, special="nan", subnormals=False)
    operands = FP8 if fp8_operands else None
    return emulated_matmul(a, b.t(), accumulator, chunk_size or None, operands=operands, round_operands=False)


@lru_cache(maxsize=4096)
def predicted_bits(length: int, chunk_size: int | None) -> int:
    """Return the accumulator bits that VRR predicts for a sum of FP8 products."""
    return min_accumulator_bits(PRODUCT_BITS, length, chunk_size)


class ChunkedGemm(LowPrecisionGemm):
    """The GEMMs of one layer with an emulated accumulator. Those with FP16 operands always accumulate in FP16."""

    def __init__(self, settings: ChunkedSettings, inputs: FloatFormat = FP8, others: FloatFormat = FP8) -> None:
        super().__init__()
        self.settings, self.inputs, self.others = settings, inputs, others

    def accumulator_bits(self, gemm: str, length: int) -> int:
        """Return the mantissa bits of the accumulator of the forward, backward or gradient GEMM."""
        if not self._has_fp8_operands(gemm):
            return FP16.mantissa_bits
        bits: int | None = getattr(self.settings.accumulator_bits, gemm)
        if bits is not None:
            return bits
        return max(predicted_bits(length, self.settings.chunk_size) - self.settings.bits_below_prediction, 1)

    def product(self, gemm: str, a: Tensor, b: Tensor) -> Tensor:
        """Multiply a [m, n] by the transpose of b [k, n]."""
        bits = self.accumulator_bits(gemm, a.shape[1])
        result: Tensor = torch.ops.smelt.chunked_gemm(
            a, b, bits, self.settings.chunk_size or 0, self._has_fp8_operands(gemm)
        )
        return result

    def _has_fp8_operands(self, gemm: str) -> bool:
        return self.others == FP8 and (gemm == "backward" or self.inputs == FP8)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = _ChunkedLinear.apply(x, weight, self)
        return product

    def conv2d(self, x: Tensor, weight: Tensor, conv: nn.Conv2d) -> Tensor:
        product: Tensor = _ChunkedConv2d.apply(x, weight, self, conv)
        return product


class _ChunkedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gemm: ChunkedGemm) -> Tensor:
        x, weight = round_to(x, gemm.inputs), round_to(weight, gemm.others)
        ctx.gemm = gemm
        ctx.save_for_backward(x, weight)
        return gemm.product("forward", x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gemm: ChunkedGemm = ctx.gemm
        grad = round_to(grad, gemm.others)
        grad_x = gemm.product("backward", grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = gemm.product("gradient", grad.t(), x.t()) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class _ChunkedConv2d(torch.autograd.Function):
    """The backward GEMM is a convolution of the gradients, so that it accumulates over output channels and kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gemm: ChunkedGemm, conv: nn.Conv2d) -> Tensor:
        x, weight = round_to(x, gemm.inputs), round_to(weight, gemm.others)
        ctx.gemm, ctx.conv = gemm, conv
        ctx.save_for_backward(x, weight)
        return to_images(gemm.product("forward", unfold(x, conv), weight.flatten(1)), len(x), output_size(x, conv))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gemm: ChunkedGemm = ctx.gemm
        grad = round_to(grad, gemm.others)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            flipped = weight.flip(2, 3).transpose(0, 1).flatten(1)  # [in, out * kernel]
            rows = gemm.product("backward", _unfold_gradient(grad, x, ctx.conv), flipped)
            grad_x = to_images(rows, len(x), (x.shape[2], x.shape[3]))
        if ctx.needs_input_grad[1]:
            rows = grad.permute(0, 2, 3, 1).flatten(0, 2)  # [positions, out]
            grad_weight = gemm.product("gradient", rows.t(), unfold(x, ctx.conv).t()).view_as(weight)
        return grad_x, grad_weight, None, None


def _unfold_gradient(grad: Tensor, x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Return the output gradients that every input pixel contributes to: [batch * height * width, out * kernel]."""
    (stride_h, stride_w), padding = conv.stride, []
    batch, channels, height, width = grad.shape
    dilated = grad.new_zeros(batch, channels, (height - 1) * stride_h + 1, (width - 1) * stride_w + 1)
    dilated[:, :, ::stride_h, ::stride_w] = grad
    for dim in (1, 0):  # F.pad counts from the last dimension
        reach = conv.dilation[dim] * (conv.kernel_size[dim] - 1)
        before = reach - int(conv.padding[dim])
        padding += [before, x.shape[2 + dim] + reach - dilated.shape[2 + dim] - before]
    columns = F.unfold(F.pad(dilated, padding), conv.kernel_size, conv.dilation)
    return columns.transpose(1, 2).flatten(0, 1)


class _RoundFp16(torch.autograd.Function):
    """Round values, and their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return round_to(x, FP16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return round_to(grad, FP16)


def _round_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    is_float = isinstance(output, Tensor) and output.is_floating_point()
    return _RoundFp16.apply(output) if is_float else output


class ChunkedTraining(LowPrecisionTraining):
    """A network whose linear layers and convolutions have emulated accumulators."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks: list[RemovableHandle] = []

    def round_outputs(self, network: nn.Module) -> None:
        """Let every layer return FP16 values."""
        for module in network.modules():
            is_layer = not list(module.children()) or module in self.converted.values()
            if is_layer and not isinstance(module, LowPrecisionGemm):
                self._hooks.append(module.register_forward_hook(_round_output))

    def restore(self) -> None:
        super().restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


@torch.no_grad()
def convert_to_chunked_training(network: nn.Module, settings: ChunkedSettings) -> ChunkedTraining:
    """Let all linear layers and convolutions multiply with emulated accumulators, and round all weights to FP16."""
    training = ChunkedTraining()
    first, last = first_and_last(network)
    for name, layer in gemm_layers(network).items():
        reason = unsupported(layer)
        if reason is not None:
            raise ModelError(f"fp8-chunked covers every GEMM, and {name} cannot be converted: {reason}; use fp8.")
        if layer is last:
            gemm = ChunkedGemm(settings, FP16, FP16)
        else:
            gemm = ChunkedGemm(settings, FP16 if layer is first else FP8)
        training.convert(name, layer, gemm)
    if not training.converted:
        raise ModelError("this network has no linear layer or convolution, so that fp8-chunked does nothing.")
    for parameter in network.parameters():
        parameter.copy_(round_to(parameter, FP16))
    training.round_outputs(network)
    return training
