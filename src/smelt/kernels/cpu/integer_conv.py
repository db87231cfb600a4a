"""Convolutions of integer-only networks on CPUs: the packed weight, and the task of `source/integer_conv.h`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.conv import ConvShape
from smelt.kernels.integer_interface import PackedWeight, round_up


def pack_convolution(library: Any, weight: Tensor, shape: ConvShape, is_unsigned: bool) -> PackedWeight:
    """Pack an int8 weight [out, in / groups, (height,) width] as panels of a matrix per group, or by taps."""
    weight = weight.reshape(shape.out_channels, -1, *shape.kernel)
    if is_depthwise(shape):
        weight = weight.contiguous()
        data = torch.empty(library.smelt_integer_depthwise_size(shape.out_channels, *shape.kernel), dtype=torch.int8)
        offset = torch.empty(round_up(shape.out_channels), dtype=torch.int32)
        library.smelt_integer_pack_depthwise(
            weight.data_ptr(), shape.out_channels, *shape.kernel, is_unsigned, data.data_ptr(), offset.data_ptr()
        )
        return PackedWeight(data, offset, shape.out_channels, shape.columns, is_unsigned)
    outputs = shape.out_channels // shape.groups
    matrices = weight.permute(0, 2, 3, 1).reshape(shape.groups, outputs, shape.columns).contiguous()
    data = torch.empty(shape.groups, library.smelt_integer_packed_size(outputs, shape.columns), dtype=torch.int8)
    offset = torch.empty(shape.groups, round_up(outputs), dtype=torch.int32)
    for matrix, packed, offsets in zip(matrices, data, offset, strict=True):
        library.smelt_integer_pack(
            matrix.data_ptr(), outputs, shape.columns, is_unsigned, packed.data_ptr(), offsets.data_ptr()
        )
    return PackedWeight(data, offset, shape.out_channels, shape.columns, is_unsigned)


def is_depthwise(shape: ConvShape) -> bool:
    return shape.groups > 1 and shape.groups == shape.in_channels == shape.out_channels


def channels_last(x: Tensor) -> Tensor:
    """Return x [batch, channels, (height,) width] contiguous as [batch, (height,) width, channels]."""
    return x.movedim(1, -1).contiguous()


def convolution_sizes(x: Tensor, shape: ConvShape) -> tuple[int, ...]:
    """Return the sizes of a task of x [batch, (height,) width, channels], in the order of its structure."""
    height, width = x.shape[1:-1] if x.dim() == 4 else (1, x.shape[1])
    (top, _), (left, _) = shape.padding
    return (
        len(x), height, width, shape.in_channels, shape.out_channels, shape.groups, *shape.kernel, *shape.stride, top,
        left, *shape.dilation, *shape.output_size(height, width),
    )  # fmt: skip


SIZE_FIELDS = [
    (name, ctypes.c_int64)
    for name in (
        *("batch", "height", "width", "channels", "out_channels", "groups", "kernel_height", "kernel_width"),
        *("stride_height", "stride_width", "top", "left", "dilation_height", "dilation_width"),
        *("out_height", "out_width"),
    )
]
