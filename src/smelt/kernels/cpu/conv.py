"""The compiled integer convolution: the same fields as `ConvPlan` in `source/int8_conv.h`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.conv import ConvShape
from smelt.kernels.cpu.operator import threads_for


class ConvPlan(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("batch", "height", "width", "channels", "kernel_height", "kernel_width", "stride_height", "stride_width"),
            *("top", "left", "dilation_height", "dilation_width", "out_height", "out_width"),
        )
    ]


def convolve(library: Any, linear_plan: int, x: Tensor, shape: ConvShape) -> Tensor:
    """Convolve images [batch, channels, height, width] with a packed matrix; the result is in channels-last layout."""
    batch, channels, height, width = x.shape
    if channels != shape.in_channels:
        raise ValueError(f"the images have {channels} channels, the convolution has {shape.in_channels}")
    out_height, out_width = shape.output_size(height, width)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.empty((batch, out_height, out_width, shape.out_channels), dtype=x.dtype)
    if y.numel():
        plan = ConvPlan(
            batch, height, width, channels, *shape.kernel, *shape.stride, shape.padding[0][0], shape.padding[1][0],
            *shape.dilation, out_height, out_width,
        )  # fmt: skip
        threads = threads_for(y.numel() * shape.columns)
        library.smelt_conv(linear_plan, ctypes.addressof(plan), x.data_ptr(), y.data_ptr(), threads)
    return y.permute(0, 3, 1, 2)
