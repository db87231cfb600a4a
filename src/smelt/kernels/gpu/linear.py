"""Triton linear kernels, to be registered in `smelt.kernels.linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smelt.kernels.gpu import hopper_layout, launch
from smelt.kernels.gpu.arch import PTX
from smelt.kernels.gpu.matrix import Matrix, describe
from smelt.kernels.gpu.operators import eight_bit, weight_only
from smelt.kernels.linear import ActivationQuant, LinearKernel, PackedMatrix, register
from smelt.numerics.elements import E4M3
from smelt.numerics.format import PER_ROW
from smelt.numerics.integer import DenormalInteger, Integer
from smelt.numerics.scaled import Scaled, SignedScales, Ternary

HALF = (torch.bfloat16, torch.float16)
FLOATS = ("float32", "float16", "bfloat16")


class WeightOnly(LinearKernel):
    """Inputs in half precision, a matrix in any format: fast unless `launch.weight_only_path` is `expand`."""

    name = "triton-weight-only"

    def supports(self, packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> bool:
        supported = isinstance(packed.format, Integer | Scaled)
        return supported and inputs is None and dtype in HALF and runs_on(packed.device)

    def dequantizes(self, packed: PackedMatrix) -> bool:
        matrix = describe(packed)
        if hopper_layout.runs_on(packed.device) and hopper_layout.layout_of(matrix, torch.bfloat16) is not None:
            return False  # the engine has another kernel
        return all(launch.weight_only_path(batch, matrix) == "expand" for batch in (1, 16))

    def prepare(self, packed: PackedMatrix, inputs: ActivationQuant | None) -> Matrix:
        return describe(packed)

    def run(
        self, x: Tensor, packed: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None, prepared: Any
    ) -> Tensor:
        y = weight_only(x.reshape(-1, packed.columns), bias, *prepared.arguments())
        return y.reshape(*x.shape[:-1], packed.rows)


class EightBit(LinearKernel):
    """int8 inputs with per-row or static scales and 4- or 8-bit integer or dINT4 weights; or E4M3 for both."""

    name = "triton-eight-bit"
    quantizes_inputs = True

    def supports(self, packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> bool:
        if inputs is None or dtype not in HALF or not runs_on(packed.device) or not _has_supported_scales(inputs):
            return False
        if isinstance(inputs.format, Integer):
            return _is_int_matrix(packed) and launch.gemm_block_k(describe(packed), 32) is not None
        return dtype == torch.bfloat16 and _is_e4m3_matrix(packed)

    def prepare(self, packed: PackedMatrix, inputs: ActivationQuant | None) -> Matrix:
        return describe(packed)

    def run(
        self, x: Tensor, packed: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None, prepared: Any
    ) -> Tensor:
        assert inputs is not None
        y = eight_bit(
            x.reshape(-1, packed.columns), bias, inputs.scale, inputs.clip_ratio, amax_code(inputs),
            inputs.format.scale_dtype, *prepared.arguments(),
        )  # fmt: skip
        return y.reshape(*x.shape[:-1], packed.rows)


def runs_on(device: torch.device) -> bool:
    """Return whether kernels run on a device: CUDA, or the CPU under Triton's interpreter."""
    return device.type == ("cuda" if PTX else "cpu")


def _has_supported_scales(inputs: ActivationQuant) -> bool:
    """Return whether inputs are symmetric 8-bit integers or E4M3 with per-row scales or one static scale."""
    number_format = inputs.format
    if inputs.scale is not None and inputs.scale.numel() != 1:
        return False
    if number_format.scale_dtype not in FLOATS or (number_format.group_size != PER_ROW and inputs.scale is None):
        return False
    if type(number_format) is Integer:
        return number_format.bits == 8 and number_format.symmetric
    return type(number_format) is Scaled and number_format.elements == E4M3


def amax_code(inputs: ActivationQuant) -> float:
    """Return the code magnitude that the largest magnitude of a row maps to."""
    if isinstance(inputs.format, Integer):
        return inputs.format.qmax / 2 if inputs.format.full_range else inputs.format.qmax // 2
    return E4M3.max_value


def _is_int_matrix(packed: PackedMatrix) -> bool:
    number_format = packed.format
    if isinstance(number_format, DenormalInteger):
        return number_format.bits == 4 and number_format.zero_dtype == "code"
    return isinstance(number_format, Integer) and number_format.bits in (4, 8) and number_format.zero_dtype == "code"


def _is_e4m3_matrix(packed: PackedMatrix) -> bool:
    """Return whether PyTorch's E4M3 GEMM supports the matrix."""
    number_format = packed.format
    single_scale_format = isinstance(number_format, Scaled) and not isinstance(number_format, SignedScales | Ternary)
    one_scale = packed.tensors["scale"].shape[-2] == 1 and number_format.scale_dtype in FLOATS
    aligned = packed.rows % 16 == 0 and packed.columns % 16 == 0
    return single_scale_format and one_scale and aligned and getattr(number_format, "elements", None) == E4M3


def register_kernels() -> None:
    for kernel in (WeightOnly(), EightBit()):
        register(kernel)
