"""Linear kernels as custom operators with shape inference, for `torch.compile` and graph capture."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.kernels.gpu import launch
from smelt.kernels.gpu.matrix import Matrix


@torch.library.custom_op("smelt_gpu::weight_only", mutates_args=())
def weight_only(
    x: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor, zero: Tensor | None, negative: Tensor | None,
    tensor: Tensor | None, table: Tensor | None, columns: int, bits: int, element: str, scale_dtype: str,
    group_size: int, default_zero: int,
) -> Tensor:  # fmt: skip
    """Multiply x [batch, columns] in half precision with a packed matrix."""
    matrix = Matrix(
        codes, scale, zero, negative, tensor, table, columns, bits, element, scale_dtype, group_size, default_zero
    )
    return launch.weight_only(x, matrix, bias)


@torch.library.custom_op("smelt_gpu::eight_bit", mutates_args=())
def eight_bit(
    x: Tensor, bias: Tensor | None, static_scale: Tensor | None, clip_ratio: float, amax_code: float,
    x_scale_dtype: str, codes: Tensor, scale: Tensor, zero: Tensor | None, negative: Tensor | None,
    tensor: Tensor | None, table: Tensor | None, columns: int, bits: int, element: str, scale_dtype: str,
    group_size: int, default_zero: int,
) -> Tensor:  # fmt: skip
    """Quantize x [batch, columns] to int8 (E4M3 if the matrix is) and multiply with a packed matrix."""
    matrix = Matrix(
        codes, scale, zero, negative, tensor, table, columns, bits, element, scale_dtype, group_size, default_zero
    )
    return launch.eight_bit(
        x,
        matrix,
        bias,
        static_scale=static_scale,
        clip_ratio=clip_ratio,
        amax_code=amax_code,
        x_scale_dtype=x_scale_dtype,
    )


@weight_only.register_fake
def _(x: Tensor, bias: Tensor | None, codes: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


@eight_bit.register_fake
def _(
    x: Tensor, bias: Tensor | None, static_scale: Tensor | None, clip_ratio: float, amax_code: float,
    x_scale_dtype: str, codes: Tensor, *rest: object,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], codes.shape[0])
