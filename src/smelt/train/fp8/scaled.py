"""FP8 GEMMs with scaled operands, as on today's GPUs: E4M3 forward, E5M2 gradients, FP32 accumulation.

An operand is divided by a scale so that its largest magnitude becomes the largest value of the format: per tensor
(current or delayed scaling), row or block. Names follow torchao.float8 and Transformer Engine. On a GPU with FP8
instructions the products are `torch._scaled_mm`; elsewhere they are emulated: operands have the same bits, and only
the order of the float32 additions differs. With row and block scales gradients are E4M3 too.

A scale belongs to a rank: ranks compute theirs from their own tensors. Only the amax history of delayed scaling is
shared: after each step all ranks take the largest amax of any.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.errors import ModelError
from smelt.train.fp8.layers import (
    LowPrecisionGemm,
    LowPrecisionTraining,
    compute_dtype,
    first_and_last,
    gemm_layers,
    unsupported,
)
from smelt.train.fp8.settings import Fp8Settings

logger = logging.getLogger(__name__)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BlockShape = tuple[int | None, int | None]  # rows and columns that share a scale; None: all
TENSOR, ROW, TILE, SQUARE = (None, None), (1, None), (1, 128), (128, 128)
_MIN_AMAX = 1e-12  # as in torchao: a tensor of zeros has a finite scale
_EXPONENT = 0x7F800000  # of float32
_CUBLAS_ROWS = 4  # a block-scaled GEMM has a multiple of so many rows
INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2  # columns of an amax history


@dataclass(frozen=True)
class ScalingRecipe:
    """Which elements share a scale, and the format of gradients."""

    activations: BlockShape  # and gradients of outputs
    weights: BlockShape
    grad_dtype: torch.dtype
    power_of_two: bool  # scales are rounded down to one
    multiple: int  # that the dimensions of an operand must be of
    min_capability: tuple[int, int]  # of a CUDA device with a GEMM for it
    max_capability: tuple[int, int] = (99, 0)


_TENSORWISE = ScalingRecipe(TENSOR, TENSOR, E5M2, power_of_two=False, multiple=16, min_capability=(8, 9))
RECIPES = {
    "tensorwise": _TENSORWISE,
    "delayed": _TENSORWISE,
    "rowwise": ScalingRecipe(ROW, ROW, E4M3, power_of_two=True, multiple=16, min_capability=(9, 0)),
    "blockwise": ScalingRecipe(
        TILE, SQUARE, E4M3, power_of_two=False, multiple=128, min_capability=(9, 0), max_capability=(9, 0)
    ),
}


class Float8Matrix(NamedTuple):
    """FP8 values [rows, columns], and what they are multiplied by: [rows / block rows, columns / block columns]."""

    data: Tensor
    scale: Tensor
    block: BlockShape


def quantize(
    x: Tensor, dtype: torch.dtype, block: BlockShape, *, power_of_two: bool = False, amax: Tensor | None = None
) -> Float8Matrix:
    """Quantize a matrix to FP8; `amax`, [], replaces the largest magnitude of its single block.

    Values beyond it saturate. What is not finite becomes NaN, so that it is noticed.
    """
    rows, columns = x.shape
    block_rows, block_columns = block[0] or rows, block[1] or columns
    blocks = x.reshape(rows // block_rows, block_rows, columns // block_columns, block_columns).float()
    largest = blocks.abs().amax((1, 3), keepdim=True) if amax is None else amax.float().reshape(1, 1, 1, 1)
    limit = torch.finfo(dtype).max
    scale = limit / largest.clamp(min=_MIN_AMAX)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    scaled = (blocks * scale).clamp(-limit, limit)  # a cast saturates in eager mode since torch 2.12 only
    if amax is not None:
        scaled = torch.where(blocks.isinf(), torch.nan, scaled)
    # Of a transposed view, too, rows become contiguous: FP8 GEMMs need that.
    data = scaled.reshape(rows, columns).to(dtype, memory_format=torch.contiguous_format)
    return Float8Matrix(data, scale.reciprocal()[:, 0, :, 0], block)


def transpose(matrix: Float8Matrix) -> Float8Matrix:
    """Transpose a matrix whose blocks are square; rows of the result are contiguous, as FP8 GEMMs need."""
    return Float8Matrix(matrix.data.t().contiguous(), matrix.scale.t(), matrix.block)


def dequantize(matrix: Float8Matrix) -> Tensor:
    """Return the values in float32."""
    return matrix.data.float() * _expand(matrix.scale, matrix.data)


def _expand(scale: Tensor, data: Tensor) -> Tensor:
    rows, columns = (size // count for size, count in zip(data.shape, scale.shape, strict=True))
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def scaled_mm(
    a: Float8Matrix, b: Float8Matrix, out_dtype: torch.dtype, *, native: bool, fast_accumulation: bool = False
) -> Tensor:
    """Multiply a [m, n] by the transpose of b [k, n] -> [m, k].

    native: use the device's FP8 GEMM; else emulate it. fast_accumulation: keep partial sums in the tensor cores, whose
    additions are less precise, instead of promoting them to float32 on the way.
    """
    in_blocks = a.block == TILE
    product: Tensor
    if not native or (in_blocks and len(a.data) % _CUBLAS_ROWS):
        product = torch.ops.smelt.emulated_scaled_mm(a.data, a.scale, b.data, b.scale, out_dtype)
    elif in_blocks:
        product = torch.ops.smelt.blockwise_scaled_mm(a.data, a.scale, b.data, b.scale)
    else:
        in_rows = a.block == ROW
        scales = (a.scale, b.scale.t()) if in_rows else (a.scale.reshape(()), b.scale.reshape(()))
        dtype = torch.bfloat16 if in_rows else out_dtype  # rows have kernels for bfloat16 only
        product = torch._scaled_mm(a.data, b.data.t(), *scales, out_dtype=dtype, use_fast_accum=fast_accumulation)
    # A cast to the same dtype would return its argument: behind a compiled autograd.Function that returns that, PyTorch
    # 2.11 loses the gradient.
    return product if product.dtype == out_dtype else product.to(out_dtype)


@torch.library.custom_op("smelt::blockwise_scaled_mm", mutates_args=())
def blockwise_scaled_mm(a: torch.Tensor, scale_a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """Multiply a [m, n], with scales of 1x128, by the transpose of b [k, n], with scales of 1x128 or 128x128.

    By cuBLAS, whose results are bfloat16; an operator, since torch.compile does not trace PyTorch's function.
    """
    block_b = TILE if len(scale_b) == len(b) else SQUARE
    (layout_a, kind_a), (layout_b, kind_b) = _cublas_scale(scale_a, TILE), _cublas_scale(scale_b, block_b)
    return F.scaled_mm(a, b.t(), layout_a, kind_a, layout_b, kind_b, output_dtype=torch.bfloat16)


@blockwise_scaled_mm.register_fake
def _(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=torch.bfloat16)


def _cublas_scale(scale: Tensor, block: BlockShape) -> tuple[Tensor, Any]:
    """Lay out scales for cuBLAS: those of 1x128 with contiguous columns; those of 128x128 transposed, with the inner
    dimension padded to a multiple of 4."""
    if block == TILE:
        return scale.t().contiguous().t(), F.ScalingType.BlockWise1x128
    return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t(), F.ScalingType.BlockWise128x128


@torch.library.custom_op("smelt::emulated_scaled_mm", mutates_args=())
def emulated_scaled_mm(
    a: torch.Tensor, scale_a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Multiply with float32 additions. Scales of tensors and rows multiply the sum, those of blocks the operands."""
    with torch.autocast(a.device.type, enabled=False):
        if all(scale.shape in ((1, 1), (len(data), 1)) for scale, data in ((scale_a, a), (scale_b, b))):
            return ((a.float() @ b.float().t()) * scale_a * scale_b.t()).to(out_dtype)
        left, right = (data.float() * _expand(scale, data) for data, scale in ((a, scale_a), (b, scale_b)))
        return (left @ right.t()).to(out_dtype)


@emulated_scaled_mm.register_fake
def _(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=out_dtype)


class _ScaledLinear(torch.autograd.Function):
    """The three GEMMs of a linear layer. `history`: the amax [3] of past steps; `current`: where to record this one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, history: Tensor | None, current: Tensor | None, recipe: ScalingRecipe,
        native: bool, out_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        past = (None, None) if history is None else (history[INPUT], history[WEIGHT])
        x8 = quantize(x, E4M3, recipe.activations, power_of_two=recipe.power_of_two, amax=past[0])
        weight8 = quantize(weight, E4M3, recipe.weights, power_of_two=recipe.power_of_two, amax=past[1])
        if current is not None:
            _record(current, INPUT, x)
            _record(current, WEIGHT, weight)
        ctx.recipe, ctx.native, ctx.history, ctx.current = recipe, native, history, current
        ctx.dtypes = x.dtype, weight.dtype, out_dtype
        ctx.fp8_gradient = len(x) % recipe.multiple == 0  # the inner dimension of the gradient GEMM
        # Operands with square blocks are transposed in backward, others quantized again along the other dimension.
        ctx.save_for_backward(
            *((x8.data, x8.scale) if ctx.fp8_gradient and recipe.activations == TENSOR else (x, None)),
            *((weight8.data, weight8.scale) if recipe.weights in (TENSOR, SQUARE) else (weight, None)),
        )
        return scaled_mm(x8, weight8, out_dtype, native=native, fast_accumulation=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        recipe: ScalingRecipe = ctx.recipe
        x_dtype, weight_dtype, out_dtype = ctx.dtypes
        amax = None if ctx.history is None else ctx.history[GRAD_OUTPUT]
        if ctx.current is not None:
            _record(ctx.current, GRAD_OUTPUT, grad)
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        grad8 = quantize(grad, recipe.grad_dtype, recipe.activations, power_of_two=recipe.power_of_two, amax=amax)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight8 = _transposed(weight, weight_scale, recipe.weights, E4M3, recipe)
            grad_x = scaled_mm(grad8, weight8, out_dtype, native=ctx.native).to(x_dtype)
        if ctx.needs_input_grad[1]:
            if ctx.fp8_gradient:
                whole = recipe.activations == TENSOR
                left = _transposed(grad8.data if whole else grad, grad8.scale if whole else None, recipe.activations,
                                   recipe.grad_dtype, recipe)  # fmt: skip
                right = _transposed(x, x_scale, recipe.activations, E4M3, recipe)
                grad_weight = scaled_mm(left, right, out_dtype, native=ctx.native).to(weight_dtype)
            else:
                grad_weight = (grad.t().to(out_dtype) @ x.to(out_dtype)).to(weight_dtype)
        return grad_x, grad_weight, None, None, None, None, None


def _transposed(
    data: Tensor, scale: Tensor | None, block: BlockShape, dtype: torch.dtype, recipe: ScalingRecipe
) -> Float8Matrix:
    """Return the transpose of an FP8 matrix, or if it has no scale yet, the quantized transpose."""
    if scale is not None:
        return transpose(Float8Matrix(data, scale, block))
    return quantize(data.t(), dtype, block, power_of_two=recipe.power_of_two)


def _record(current: Tensor, column: int, x: Tensor) -> None:
    """Take the largest magnitude into `current`; one that is not finite would stay in the history for many steps."""
    amax = x.detach().abs().amax().float()
    current[column] = torch.maximum(current[column], torch.where(amax.isfinite(), amax, 0.0))


class ScaledGemm(LowPrecisionGemm):
    """FP8 GEMMs of one layer, with its amax history if scaling is delayed."""

    amax_history: Tensor  # [steps, 3], newest first

    def __init__(self, settings: Fp8Settings, device: torch.device, *, native: bool) -> None:
        super().__init__()
        self.recipe, self.native, self.delayed = RECIPES[settings.scaling], native, settings.scaling == "delayed"
        self.has_history = False  # on the host, so that nothing waits for the device; until then scaling is current
        if self.delayed:
            self.register_buffer("amax_history", torch.zeros(settings.amax_history_len, 3, device=device))
            self.current_amax = torch.zeros(3, device=device)  # of this step; no buffer, as DDP broadcasts those

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        history = self.amax_history.amax(0) if self.has_history else None
        current = self.current_amax if self.delayed and self.training else None
        product: Tensor = _ScaledLinear.apply(x, weight, history, current, self.recipe, self.native, compute_dtype(x))
        return product


class Float8Training(LowPrecisionTraining):
    """A network with FP8 layers, whose products the device computes itself if `native`."""

    native = False

    def _delayed(self) -> list[Any]:
        gemms: list[Any] = [layer.gemm for layer in self.converted.values()]
        return [gemm for gemm in gemms if gemm.delayed]

    def on_load(self) -> None:
        for gemm in self._delayed():
            gemm.has_history = bool(gemm.amax_history.any())

    @torch.no_grad()
    def after_step(self) -> None:
        """Enter the largest magnitudes of the step, over all ranks, into the histories."""
        gemms = self._delayed()
        if not gemms:
            return
        current = torch.stack([gemm.current_amax for gemm in gemms])
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            distributed.all_reduce(current, distributed.ReduceOp.MAX)
        for gemm, amax in zip(gemms, current, strict=True):
            gemm.amax_history.copy_(torch.cat([amax[None], gemm.amax_history[:-1]]))
            gemm.current_amax.zero_()
            gemm.has_history = True


def convert_to_float8_training(network: nn.Module, settings: Fp8Settings) -> Float8Training:
    """Let the linear layers of a network multiply in FP8, except the first and the last one.

    Layers whose dimensions are no multiples of 16 (blockwise: 128) stay as they are.
    """
    training = Float8Training()
    device = next(network.parameters()).device
    native, multiple = has_native_gemm(settings.scaling, device), RECIPES[settings.scaling].multiple
    first, last = first_and_last(network)
    for name, layer in gemm_layers(network).items():
        shape = layer.weight.flatten(1).shape
        excluded = next((part for part in settings.exclude if part in name), None)
        if layer is first or layer is last:
            training.kept[name] = f"the {'first' if layer is first else 'last'} layer"
        elif excluded is not None:
            training.kept[name] = f"excluded by {excluded!r}"
        elif isinstance(layer, nn.Conv2d) and not settings.convolutions:
            training.kept[name] = "a convolution"
        elif (reason := unsupported(layer)) is not None:
            training.kept[name] = reason
        elif any(size % multiple for size in shape):
            training.kept[name] = f"{shape[0]}x{shape[1]}: not multiples of {multiple}"
        else:
            training.convert(name, layer, ScaledGemm(settings, device, native=native))
    if not training.converted:
        raise ModelError(
            f"no layer of this network can multiply in FP8 ({_summary(training.kept)}); use bf16, or set "
            "fp8.convolutions for a network of convolutions."
        )
    training.native = native
    if not native:
        logger.warning(
            "%s has no FP8 GEMM for %s scaling here: FP8 is emulated, which is slower than bf16", device.type,
            settings.scaling,
        )  # fmt: skip
    return training


def _summary(kept: dict[str, str]) -> str:
    name, reason = next(iter(kept.items()), ("it", "has no linear layer"))
    return f"{name}: {reason}" if len(kept) < 2 else f"{name}: {reason}, and {len(kept) - 1} more"


@lru_cache(maxsize=32)
def has_native_gemm(scaling: str, device: torch.device) -> bool:
    """Return whether the device multiplies FP8 itself, as a small product shows that must equal the emulated one."""
    recipe = RECIPES[scaling]
    if device.type != "cuda":
        return False
    if not recipe.min_capability <= torch.cuda.get_device_capability(device) <= recipe.max_capability:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(256, 384, generator=generator).exp().to(device) for _ in range(2))
    pairs = [
        (quantize(x, recipe.grad_dtype, recipe.activations), quantize(weight, E4M3, recipe.weights)),
        (quantize(x, recipe.grad_dtype, recipe.activations), quantize(weight, E4M3, recipe.activations)),
    ]
    try:
        return all(
            torch.allclose(
                scaled_mm(a, b, torch.bfloat16, native=True),
                scaled_mm(a, b, torch.bfloat16, native=False),
                rtol=0.02,  # one or two steps of bfloat16: all terms are positive
            )
            for a, b in pairs
        )
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        logger.warning("the FP8 GEMM of this device cannot be used for %s scaling (%s)", scaling, error)
        return False
