"""Convolutions with a packed weight: im2col, the plain reference, and the integer product on CPUs and GPUs.

The weight is stored as a matrix [out channels, kernel height * kernel width * in channels / groups], channels last, so
that one kernel row of an image in channels-last layout is contiguous. An image has one activation scale, and a 1-d
convolution is one with a height of 1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.errors import ModelError
from smelt.kernels.linear import ActivationQuant, LinearKernel, PackedMatrix, offset_products
from smelt.numerics.format import QuantizedTensor, QuantParams
from smelt.numerics.integer import Integer
from smelt.numerics.scaled import Ternary

Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvShape:
    """Channels, kernel, stride, zero padding (before and after), dilation and groups of a convolution."""

    in_channels: int
    out_channels: int
    kernel: Pair  # height and width; 1 and width for a 1-d convolution
    stride: Pair
    padding: tuple[Pair, Pair]  # (top, bottom), (left, right)
    dilation: Pair
    groups: int
    dimensions: int  # 1 or 2

    @classmethod
    def of(cls, module: nn.Module) -> ConvShape:
        """Return the shape of a Conv1d or Conv2d."""
        if not isinstance(module, nn.Conv1d | nn.Conv2d):
            raise ModelError(f"{type(module).__name__} is not a 1-d or 2-d convolution.")
        if module.padding_mode != "zeros":
            raise ModelError(
                f"a convolution that pads with {module.padding_mode} cannot be quantized, only with zeros."
            )
        kernel, dilation = _pair(module.kernel_size), _pair(module.dilation)
        if module.padding == "same":
            totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
            padding = [(total // 2, total - total // 2) for total in totals]
        else:
            sides = (0, 0) if module.padding == "valid" else _pair(module.padding, fill=0)
            padding = [(side, side) for side in sides]
        return cls(
            module.in_channels, module.out_channels, kernel, _pair(module.stride), (padding[0], padding[1]), dilation,
            module.groups, len(module.kernel_size),
        )  # fmt: skip

    @property
    def columns(self) -> int:
        """The number of weights per output channel."""
        return self.in_channels // self.groups * math.prod(self.kernel)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight in PyTorch: [out, in / groups, (height,) width]."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel[2 - self.dimensions :])

    def output_size(self, height: int, width: int) -> Pair:
        """Return height and width of the output."""
        sizes = [
            (size + sum(pad) - d * (k - 1) - 1) // s + 1
            for size, pad, d, k, s in zip(
                (height, width), self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        ]
        return sizes[0], sizes[1]

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Convert a weight [out, in / groups, (height,) width] to a matrix [out, columns]."""
        return weight.reshape(self.out_channels, -1, *self.kernel).permute(0, 2, 3, 1).reshape(self.out_channels, -1)

    def to_weight(self, matrix: Tensor) -> Tensor:
        """Invert `to_matrix`, as a 2-d convolution: [out, in / groups, height, width]."""
        return matrix.reshape(self.out_channels, *self.kernel, -1).permute(0, 3, 1, 2)

    def images(self, x: Tensor) -> Tensor:
        """View the inputs [..., channels, (height,) width] as images [batch, channels, height, width]."""
        x = x if self.dimensions == 2 else x.unsqueeze(-2)
        return x if x.dim() == 4 else x[None]

    def outputs(self, y: Tensor, x: Tensor) -> Tensor:
        """Invert `images` for the outputs of inputs x."""
        y = y if x.dim() == self.dimensions + 2 else y[0]
        return y if self.dimensions == 2 else y.squeeze(-2)

    def unfold(self, x: Tensor) -> Tensor:
        """Return the inputs of every output position (im2col): x [batch, channels, height, width] ->
        [batch * positions, groups, columns]."""
        (top, bottom), (left, right) = self.padding
        images = F.pad(x, (left, right, top, bottom)).permute(0, 2, 3, 1).contiguous()
        height, width = self.output_size(*x.shape[2:])
        batch_stride, row, pixel, channel = images.stride()
        windows = images.as_strided(
            (len(x), height, width, *self.kernel, self.in_channels),
            (
                batch_stride, row * self.stride[0], pixel * self.stride[1],
                row * self.dilation[0], pixel * self.dilation[1], channel,
            ),
        )  # fmt: skip
        size = self.in_channels // self.groups
        taps = windows.reshape(len(x) * height * width, math.prod(self.kernel), self.groups, size)
        return taps.transpose(1, 2).reshape(len(taps), self.groups, self.columns)

    def convolve(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve images with a dense weight."""
        (top, bottom), (left, right) = self.padding
        even = top == bottom and left == right
        x = x if even else F.pad(x, (left, right, top, bottom))
        padding = (top, left) if even else (0, 0)
        return F.conv2d(x, self.to_weight(matrix), bias, self.stride, padding, self.dilation, self.groups)


class ConvKernel(LinearKernel):
    """A linear kernel that also convolves images with a packed matrix, without unfolding them in memory."""

    @abstractmethod
    def supports_conv(self, packed: PackedMatrix, inputs: ActivationQuant) -> bool:
        """Return whether it convolves with this matrix; `supports` says whether it multiplies."""

    @abstractmethod
    def convolve(self, x: Tensor, bias: Tensor | None, *, shape: ConvShape, prepared: Any) -> Tensor:
        """Convolve images [batch, channels, height, width], in the dtype of x."""


def fake_quantize_images(inputs: ActivationQuant, x: Tensor) -> Tensor:
    """Fake-quantize images [batch, channels, height, width] with one scale each."""
    return inputs.fake_quantize(x.flatten(1)).view_as(x)


def reference_conv(
    x: Tensor, shape: ConvShape, packed: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None
) -> Tensor:
    """Dequantize the weight, fake-quantize the images, convolve. Every other path is compared with this one."""
    rounded = x if inputs is None else fake_quantize_images(inputs, x)
    return shape.convolve(rounded, packed.unpack().dequantize().to(x.dtype), bias)


def product_inputs(inputs: ActivationQuant | None, shape: ConvShape, device: torch.device) -> ActivationQuant | None:
    """Return how an integer product of unfolded images gets its inputs; None if there is no such product.

    With one scale per image, the images are divided by their scales first: the product then has a scale of 1. With a
    static zero point, the product is that of shifted images. Unsigned inputs are signed ones of a bit more.
    """
    if inputs is not None:
        inputs = inputs.without_zero_point() or inputs.as_signed() or inputs
    if inputs is None or shape.groups > 1 or type(inputs.format) is not Integer or not inputs.format.symmetric:
        return None
    scale = torch.ones(1, 1, 1, device=device) if inputs.scale is None else inputs.scale
    return ActivationQuant(inputs.format, scale)


def widen_to_int8(packed: PackedMatrix) -> PackedMatrix:
    """Return the same matrix in 8 bits, if its bits have no integer kernel on CPU and its values are integers.

    Levels between two integers, as those of 2 bits without a zero, are doubled, and their scale is halved. The weight
    of a convolution is small, so that this takes little memory.
    """
    number_format = packed.format
    if packed.device.type != "cpu" or number_format.bits in (4, 8):
        return packed
    weight = packed.unpack()
    groups = number_format.split_groups(weight.codes)
    if type(number_format) is Integer:
        values = groups - number_format.zero_point(weight.qparams)
    elif type(number_format) is Ternary:
        values = number_format.elements.decode(groups.to(torch.uint8))
    else:
        return packed
    factor = 1 if torch.equal(values, values.round()) else 2
    codes = factor * values + 128
    if not torch.equal(codes, codes.round().clamp(0, 255)):
        return packed
    wide = Integer(number_format.group_size, "float32", 8)
    codes = codes.flatten(-2)[..., : packed.columns].to(torch.uint8)
    tensors = QuantizedTensor(wide, codes, QuantParams(weight.qparams.scale / factor)).pack()
    return PackedMatrix(wide, packed.rows, packed.columns, tensors)


def prepare_conv(
    kernel: LinearKernel, shape: ConvShape, packed: PackedMatrix, inputs: ActivationQuant
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return the integer convolution of a linear kernel, as a function of images and bias."""
    if (shifted := inputs.without_zero_point()) is not None:
        run = prepare_conv(kernel, replace(shape, padding=((0, 0), (0, 0))), packed, shifted)
        return partial(
            zero_point_conv, padding=shape.padding, inputs=inputs, padding_value=-float(inputs.offset),
            products=offset_products(packed, inputs), run=run,
        )  # fmt: skip
    if (signed := inputs.as_signed()) is not None:
        return partial(unsigned_conv, run=prepare_conv(kernel, shape, packed, signed))
    if isinstance(kernel, ConvKernel) and kernel.supports_conv(packed, inputs):
        return partial(kernel.convolve, shape=shape, prepared=kernel.prepare(packed, inputs))
    product = product_inputs(inputs, shape, packed.device)
    run = partial(kernel.run, packed=packed, inputs=product, prepared=kernel.prepare(packed, product))
    return partial(im2col_conv, shape=shape, inputs=inputs, run=run)


def zero_point_conv(
    x: Tensor, bias: Tensor | None, *, padding: tuple[Pair, Pair], inputs: ActivationQuant, padding_value: float,
    products: Tensor, run: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:  # fmt: skip
    """Convolve images whose quantization has a static zero point with `run`, for shifted images without padding.

    Zeros that pad an image are shifted, too, so that `products`, those of the weight with the offset, are the same at
    every position.
    """
    (top, bottom), (left, right) = padding
    images = F.pad(inputs.shift(x.flatten(1)).view_as(x), (left, right, top, bottom), value=padding_value)
    return run(images, products if bias is None else products + bias)


def unsigned_conv(x: Tensor, bias: Tensor | None, *, run: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """Convolve images whose quantization has no levels below zero with `run`, which has such levels, too."""
    return run(x.clamp(min=0), bias)


def im2col_conv(
    x: Tensor, bias: Tensor | None, *, shape: ConvShape, inputs: ActivationQuant, run: Callable[..., Tensor]
) -> Tensor:
    """Convolve images with the integer product of a linear kernel, `run`, for `product_inputs`."""
    height, width = shape.output_size(*x.shape[2:])
    if inputs.scale is not None:
        y = run(shape.unfold(x)[:, 0], bias=bias)
    else:
        number_format = inputs.format
        assert isinstance(number_format, Integer)
        scales = _image_scales(inputs, x)  # [batch, 1, 1, 1]
        codes = (x.float() / scales).round().clamp(-number_format.qmax // 2, number_format.qmax // 2)
        y = run(shape.unfold(codes.to(x.dtype))[:, 0], bias=None)
        y = y.view(len(x), height * width, shape.out_channels).float() * scales.view(-1, 1, 1)
        y = (y if bias is None else y + bias).to(x.dtype)
    return y.view(len(x), height, width, shape.out_channels).permute(0, 3, 1, 2)


def _image_scales(inputs: ActivationQuant, x: Tensor) -> Tensor:
    """Return the scale of each image from its largest magnitude, [batch, 1, 1, 1]."""
    number_format = inputs.format
    qparams = number_format.compute_qparams(number_format.split_groups(x.flatten(1)), clip_ratio=inputs.clip_ratio)
    return qparams.scale.view(-1, 1, 1, 1)


def _pair(value: Any, fill: int = 1) -> Pair:
    """Return height and width of a tuple of one or two sizes; `fill` is the height of a 1-d convolution."""
    sizes = tuple(int(size) for size in value)
    return (fill, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])
