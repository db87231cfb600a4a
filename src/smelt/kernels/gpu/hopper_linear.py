"""Linear layers of the engine on Hopper GPUs: weights shuffled once, and the kernel for each batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.dispatch import warn_of_fallback
from smelt.kernels.gpu import hopper, hopper_config, hopper_layout, hopper_source, launch
from smelt.kernels.gpu.activations import QuantizedRows, RowQuant
from smelt.kernels.gpu.arch import num_sms
from smelt.kernels.gpu.linear import EightBit, WeightOnly, amax_code
from smelt.kernels.gpu.matrix import Matrix, describe
from smelt.kernels.gpu.nvrtc import CudaError
from smelt.kernels.linear import ActivationQuant, PackedMatrix
from smelt.numerics.integer import Integer

GEMM_BATCH = 2048  # largest batch with weights dequantized in registers; beyond, the matrix is dequantized first


@dataclass(frozen=True)
class HopperLinear:
    """A product with a packed matrix: half-precision inputs, or inputs that are quantized to int8 or E4M3."""

    weights: hopper_layout.ShuffledMatrix
    inputs: ActivationQuant | None

    @classmethod
    def prepare(
        cls, parts: Sequence[PackedMatrix], inputs: ActivationQuant | None, dtype: torch.dtype
    ) -> HopperLinear | None:
        """Shuffle the weights of layers with the same inputs into one matrix, in this order; None if this GPU or the
        kernels do not support it."""
        matrices = shuffle_all(parts, inputs, dtype)
        weights = None if matrices is None else hopper_layout.concatenate(matrices)
        return None if weights is None else cls(weights, inputs)

    @cached_property
    def quant(self) -> RowQuant | None:
        """How inputs are quantized; the operation before may do so already."""
        if self.inputs is None:
            return None
        return RowQuant(
            getattr(torch, self.weights.layout.operands), amax_code(self.inputs), self.inputs.format.scale_dtype,
            None if self.inputs.scale is None else self.inputs.scale.float(), self.inputs.clip_ratio,
        )  # fmt: skip

    def __call__(self, x: Tensor | QuantizedRows, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Multiply x [batch, columns] -> [batch, rows]; `out`: where the results go, columns of a larger matrix."""
        if isinstance(x, QuantizedRows):
            return self._multiply_codes(x, bias, out)
        if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
            x = x.contiguous()
        rule = self.quant
        if self.path(len(x)) == "gemv":
            return hopper.gemv(x, self.weights, bias, quant=rule, out=out)
        if rule is None:
            return self._half(x, bias, out)
        codes, scales = launch.quantize_rows(
            x, rule.dtype, rule.amax_code, rule.scale_dtype, rule.static_scale, rule.clip_ratio
        )
        return self._multiply_codes(QuantizedRows(codes, scales, x.dtype), bias, out)

    @property
    def has_gemv(self) -> bool:
        """Whether one row of x is multiplied by a kernel that can be fused with the operations around it."""
        return hopper.supports_gemv(self.weights.layout)

    def kernel_sources(self, dtype: torch.dtype) -> set[str]:
        """Return the source of every GEMM that some batch size takes, for results of a dtype."""
        sms, layout = num_sms(self.weights.tiles.device), self.weights.layout
        batches = (*hopper_config.TILE_N, *range(128, GEMM_BATCH + 1, 16))  # tiles change at multiples of 16 rows
        configs = {
            hopper_config.choose_config(batch, self.weights, sms) for batch in batches if self.path(batch) == "gemm"
        }
        return {hopper_source.kernel_source(layout, config, dtype) for config in configs}

    def path(self, batch: int) -> str:
        """Return `gemv`, `gemm`, or `expand` (dequantize first)."""
        if batch == 1 and self.has_gemv:
            return "gemv"
        only_gemm = self.weights.layout.operands == "int8"  # PyTorch has no faster product
        return "gemm" if batch <= GEMM_BATCH or only_gemm else "expand"

    def _half(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if self.path(len(x)) == "gemm":
            return hopper.gemm(x, self.weights, bias, out=out)
        y = F.linear(x, hopper.dequantize(self.weights), bias)
        return y if out is None else out.copy_(y)

    def _multiply_codes(self, x: QuantizedRows, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if self.path(len(x)) != "expand":
            return hopper.gemm(x.codes, self.weights, bias, x.scales, x.dtype, out=out)
        assert self.weights.row_scale is not None
        y = torch._scaled_mm(
            x.codes, hopper.dequantize(self.weights).t(), x.scales[:, None], self.weights.row_scale[None],
            out_dtype=x.dtype, use_fast_accum=True,
        )  # fmt: skip
        y = y if bias is None else y + bias
        return y if out is None else out.copy_(y)


def layout_for(packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> hopper_layout.Layout | None:
    """Return the layout of a packed matrix for these inputs; None if this GPU or the kernels do not support it."""
    kernel = WeightOnly() if inputs is None else EightBit()
    if not hopper_layout.runs_on(packed.device) or not kernel.supports(packed, inputs, dtype):
        return None
    operands = dtype if inputs is None else torch.int8 if isinstance(inputs.format, Integer) else hopper_layout.E4M3
    return hopper_layout.layout_of(describe(packed), operands)


def shuffle_all(
    parts: Sequence[PackedMatrix], inputs: ActivationQuant | None, dtype: torch.dtype
) -> list[hopper_layout.ShuffledMatrix] | None:
    """Shuffle packed matrices with the same inputs; None if one is not supported, or they differ in layout."""
    layouts = {layout_for(part, inputs, dtype) for part in parts}
    layout = layouts.pop()
    if layout is None or layouts:
        return None
    matrices = [describe(part) for part in parts]
    if any(_has_nan_scales(matrix) for matrix in matrices):
        return None
    device = parts[0].device
    try:
        hopper.load_dequantize(layout, device)  # fails early where kernels cannot be compiled
        hopper.stream_k_workspace(device)  # before a CUDA graph is captured
    except CudaError as error:
        warn_of_fallback(f"the kernels for Hopper GPUs cannot be compiled, so slower ones are used ({error!s:.200})")
        return None
    return [hopper_layout.shuffle(matrix, layout) for matrix in matrices]


def _has_nan_scales(matrix: Matrix) -> bool:
    """Return whether a scale in E4M3 or E8M0 is NaN, which the kernels do not spread."""
    if matrix.scale_dtype not in ("e4m3", "e8m0"):
        return False
    nan = 0x7F if matrix.scale_dtype == "e4m3" else 0xFF
    codes = matrix.scale & nan if matrix.scale_dtype == "e4m3" else matrix.scale
    return bool((codes == nan).any())
