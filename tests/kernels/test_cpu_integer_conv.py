"""Compiled integer convolutions: the bits of the reference, with every instruction set of this CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smelt.kernels.conv import ConvShape
from smelt.kernels.cpu.integer import CpuKernels, library
from smelt.kernels.integer_interface import Add, Steps
from smelt.runtime.integer import ops
from tests.kernels import integer_cases as cases
from tests.kernels.instruction_sets import MACHINES, NEEDS_COMPILER

pytestmark = NEEDS_COMPILER


@pytest.fixture(params=MACHINES)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    lib = library(request.param)
    assert lib is not None, request.param
    return CpuKernels(lib)


def shape_2d(
    channels: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0), dilation: tuple[int, int] = (1, 1), groups: int = 1,
) -> ConvShape:  # fmt: skip
    sides = [(side, side) for side in padding]
    return ConvShape(channels, outputs, kernel, stride, (sides[0], sides[1]), dilation, groups, 2)


def shape_1d(
    channels: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1
) -> ConvShape:
    along = ((0, 0), (padding, padding))
    return ConvShape(channels, outputs, (1, kernel), (1, stride), along, (1, dilation), groups, 1)


# A shape, the sizes of the batch, and the sizes of the image.
DENSE: list[tuple[ConvShape, tuple[int, ...]]] = [
    (shape_2d(3, 16, (3, 3), padding=(1, 1)), (2, 9, 11)),
    (shape_2d(16, 33, (3, 3), (2, 2), (1, 1)), (1, 8, 7)),
    (shape_2d(1, 70, (10, 4), (2, 2), (5, 1)), (1, 49, 10)),
    (shape_2d(32, 7, (3, 2), (1, 3), (2, 0), (2, 2)), (3, 7, 13)),
    (shape_2d(5, 6, (1, 1)), (1, 3, 3)),
    (shape_2d(5, 6, (1, 1), (2, 2)), (1, 5, 5)),
    (shape_2d(48, 64, (1, 1), padding=(1, 1)), (2, 4, 4)),
    (shape_2d(12, 8, (3, 3), padding=(1, 1), groups=4), (1, 6, 5)),
    (shape_2d(32, 64, (3, 3), padding=(1, 1), dilation=(1, 2), groups=2), (1, 6, 9)),
    (shape_2d(4, 8, (3, 3), groups=4), (1, 6, 5)),
    (shape_2d(2, 3, (5, 7), padding=(4, 6)), (1, 1, 1)),
    (shape_1d(20, 30, 5, 2, 2), (2, 33)),
    (shape_1d(16, 16, 3, padding=4, dilation=3), (1, 70)),
    (shape_1d(40, 17, 1), (2, 130)),
]
DEPTHWISE: list[tuple[ConvShape, tuple[int, ...]]] = [
    (shape_2d(16, 16, (3, 3), padding=(1, 1), groups=16), (2, 9, 11)),
    (shape_2d(8, 8, (3, 3), (2, 2), (1, 1), groups=8), (1, 24, 24)),
    (shape_2d(37, 37, (5, 2), (3, 1), (2, 3), groups=37), (1, 11, 150)),
    (shape_2d(20, 20, (3, 3), (2, 3), (4, 4), (3, 2), groups=20), (1, 10, 13)),
    (shape_2d(64, 64, (1, 1), groups=64), (1, 3, 3)),
    (shape_2d(2, 2, (5, 5), padding=(4, 4), groups=2), (1, 1, 1)),
    (shape_1d(64, 64, 11, 2, 5, groups=64), (2, 301)),
    (shape_1d(24, 24, 33, padding=16, groups=24), (1, 260)),
    (shape_1d(17, 17, 17, padding=16, dilation=2, groups=17), (3, 40)),
    (shape_1d(16, 16, 9, 5, 3, 7, groups=16), (1, 200)),
]


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: ConvShape) -> torch.Tensor:
    sides = [before for before, _ in shape.padding]
    if shape.dimensions == 1:
        return ops.conv1d(
            x, weight=weight, bias=bias, stride=shape.stride[1], padding=sides[1], dilation=shape.dilation[1],
            groups=shape.groups,
        )  # fmt: skip
    return ops.conv2d(
        x, weight=weight, bias=bias, stride=shape.stride, padding=sides, dilation=shape.dilation, groups=shape.groups
    )


def along_channels(steps: Steps, x: torch.Tensor, operands: Any = ()) -> torch.Tensor:
    return cases.apply(steps, x.movedim(1, -1), [each.movedim(1, -1) for each in operands]).movedim(-1, 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("case", [*DENSE, *DEPTHWISE], ids=str)
def test_convolution(kernels: CpuKernels, case: tuple[ConvShape, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Strides, dilation, padding beyond the image, groups, partial tiles and panels, every chain of steps."""
    shape, (batch, *sizes) = case
    x = cases.integers((batch, shape.in_channels, *sizes), dtype)
    weight = cases.integers(shape.weight_shape, seed=1)
    bias = cases.integers((shape.out_channels,), torch.int32, seed=2, limit=100_000)
    packed = kernels.pack_convolution(weight, shape, dtype == torch.uint8)
    product = reference(x, weight, bias, shape)
    assert torch.equal(
        kernels.convolve(x, packed, shape, None, Steps(), torch.int32), reference(x, weight, None, shape)
    )
    for steps, result in cases.chains(shape.out_channels, shape.columns):
        actual = kernels.convolve(x, packed, shape, bias, steps, result)
        assert actual.dtype == result and torch.equal(actual, along_channels(steps, product).to(result)), steps


@pytest.mark.parametrize("scale", cases.SCALES)
@pytest.mark.parametrize("groups", [1, 20])
def test_extreme_values_at_all_scales(kernels: CpuKernels, groups: int, scale: float) -> None:
    """Products of the largest bytes, which saturate 16 bits where a CPU adds pairs of them, and ratios from 1e-6."""
    shape = shape_2d(20, 20, (3, 5), padding=(1, 2), groups=groups)
    for dtype, value in ((torch.int8, -128), (torch.int8, 127), (torch.uint8, 255)):
        x = torch.full((1, 20, 6, 9), value).to(dtype)
        for code in (-128, 127):
            weight = torch.full(shape.weight_shape, code, dtype=torch.int8)
            packed = kernels.pack_convolution(weight, shape, dtype == torch.uint8)
            for result in cases.RANGES:
                steps = Steps((cases.requantize(scale, 20, result),))
                expected = along_channels(steps, reference(x, weight, None, shape)).to(result)
                assert torch.equal(kernels.convolve(x, packed, shape, None, steps, result), expected)


def test_a_residual_is_added(kernels: CpuKernels) -> None:
    """As in a block of ResNet: the sums and the shortcut requantized to a finer scale, added, and clamped from zero."""
    for shape in (shape_2d(20, 20, (3, 3), padding=(1, 1)), shape_2d(20, 20, (3, 3), padding=(1, 1), groups=20)):
        x, weight = cases.integers((2, 20, 7, 8), torch.uint8), cases.integers(shape.weight_shape, seed=1)
        packed = kernels.pack_convolution(weight, shape, True)
        for dtype in (torch.int8, torch.uint8, torch.int32):
            other = cases.integers((2, 20, 7, 8), dtype, seed=3, limit=100)
            fine = cases.requantize(20.0, 20, torch.int32)
            steps = Steps((cases.requantize(1e-1, 20, torch.int32), Add(fine), cases.requantize(1e-2, 1, torch.uint8)))
            expected = along_channels(steps, reference(x, weight, None, shape), [other]).to(torch.uint8)
            assert torch.equal(kernels.convolve(x, packed, shape, None, steps, torch.uint8, [other]), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_the_positions(kernels: CpuKernels, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in (shape_2d(16, 80, (3, 3), padding=(1, 1)), shape_2d(80, 80, (3, 3), padding=(1, 1), groups=80)):
            x, weight = cases.integers((1, shape.in_channels, 17, 13)), cases.integers(shape.weight_shape, seed=1)
            packed = kernels.pack_convolution(weight, shape, False)
            actual = kernels.convolve(x, packed, shape, None, Steps(), torch.int32)
            assert torch.equal(actual, reference(x, weight, None, shape))
    finally:
        torch.set_num_threads(before)


def test_linear_of_unsigned_activations(kernels: CpuKernels) -> None:
    x, weight = cases.integers((9, 50), torch.uint8), cases.integers((35, 50), seed=1)
    packed = kernels.pack(weight, True)
    assert torch.equal(kernels.linear(x, packed, None, Steps(), torch.int32), ops.linear(x, weight=weight))
