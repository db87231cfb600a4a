"""Compiled kernels of integer-only networks: the bits of the reference, with every instruction set of this CPU."""

from __future__ import annotations

import pytest
import torch

from smelt.errors import ConversionError
from smelt.kernels.cpu.integer import CpuKernels, library
from smelt.kernels.integer_interface import Add, Requantize, Steps, mask_rows
from smelt.runtime.integer import ops
from tests.kernels import integer_cases as cases
from tests.kernels.instruction_sets import MACHINES, NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
SHAPES = [(1, 1, 1), (3, 5, 7), (64, 16, 64), (70, 33, 130), (5, 100, 768), (129, 64, 16), (0, 4, 4)]


@pytest.fixture(params=MACHINES)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    lib = library(request.param)
    assert lib is not None, request.param
    return CpuKernels(lib)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(kernels: CpuKernels, shape: tuple[int, int, int]) -> None:
    """Whole and partial tiles, panels and depths, and every chain of steps."""
    rows, channels, columns = shape
    x, weight = cases.integers((rows, columns)), cases.integers((channels, columns), seed=1)
    bias = cases.integers((channels,), torch.int32, seed=2, limit=100_000)
    packed = kernels.pack(weight)
    for steps, dtype in cases.chains(channels, columns):
        for given in (None, bias):
            expected = cases.apply(steps, ops.linear(x, weight=weight, bias=given)).to(dtype)
            actual = kernels.linear(x, packed, given, steps, dtype)
            assert actual.dtype == dtype and torch.equal(actual, expected), (steps, given is None)


def test_linear_adds_a_residual(kernels: CpuKernels) -> None:
    """A residual of any dtype, requantized or not, with fewer rows than the result: they repeat."""
    x, weight = cases.integers((2, 33, 40)), cases.integers((50, 40), seed=1)
    product, packed = ops.linear(x, weight=weight), kernels.pack(weight)
    for dtype in (torch.int8, torch.int16, torch.int32):
        for shape in ((2, 33, 50), (33, 50), (50,)):
            other = cases.integers(shape, dtype, seed=3, limit=100)
            for requantization in (None, cases.requantize(0.7, 50, torch.int32)):
                steps = Steps((cases.requantize(1e-2, 50, torch.int32), Add(requantization), cases.requantize(0.1)))
                actual = kernels.linear(x, packed, None, steps, torch.int8, [other])
                assert torch.equal(actual, cases.apply(steps, product, [other]).to(torch.int8))
    with pytest.raises(ValueError, match="1 operands, not 0"):
        kernels.linear(x, packed, None, steps, torch.int8)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (2, 3, 17, 20, 33), (1, 2, 130, 64, 100), (2, 1, 4, 16, 16)], ids=str
)
def test_matmul(kernels: CpuKernels, shape: tuple[int, ...], transpose_b: bool) -> None:
    """Operands are views of a permuted tensor, as the heads of attention are."""
    outer, inner, rows, columns, channels = shape
    a = cases.integers((outer, rows, inner, columns)).transpose(1, 2)
    b_shape = (outer, channels, inner, columns) if transpose_b else (outer, columns, inner, channels)
    b = cases.integers(b_shape, seed=1).transpose(1, 2)
    for steps, dtype in ((Steps(), torch.int32), (Steps((cases.requantize(1e-3),)), torch.int8)):
        expected = cases.apply(steps, ops.matmul(a, b, transpose_b=int(transpose_b))).to(dtype)
        assert torch.equal(kernels.matmul(a, b, transpose_b, steps, dtype), expected)


@pytest.mark.parametrize("scale", cases.SCALES[:-1])
def test_softmax(kernels: CpuKernels, scale: float) -> None:
    """Scores of all magnitudes, in 32 and in 64 bits."""
    for length in (1, 16, 37, 130):
        constants = cases.softmax(scale, length)
        for limit in (max(int(20 / scale), 4), None):
            x = cases.integers((2, 3, 5, length), torch.int32, limit=None if limit is None else min(limit, 2**31 - 1))
            for mask in cases.masks(2, 5, length):
                expected = cases.apply_softmax(x, mask, constants).to(torch.int8)
                assert torch.equal(kernels.softmax(x, mask, Steps(), constants, torch.int8), expected), (length, limit)


def test_softmax_requantizes_first(kernels: CpuKernels) -> None:
    x, steps = cases.integers((7, 50), torch.int32, limit=10**6), Steps((cases.requantize(1e-2, dtype=torch.int16),))
    constants = cases.softmax(1e-3, 50)
    expected = cases.apply_softmax(cases.apply(steps, x), None, constants).to(torch.uint8)
    assert torch.equal(kernels.softmax(x, None, steps, constants, torch.uint8), expected)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 4), (2, 3, 20, 20, 33), (1, 2, 130, 70, 64)], ids=str)
def test_attention(kernels: CpuKernels, shape: tuple[int, ...]) -> None:
    batch, heads, queries, keys, head_dim = shape
    query, key, value = (
        cases.integers((batch, tokens, heads, head_dim), seed=seed).transpose(1, 2)
        for seed, tokens in enumerate((queries, keys, keys))
    )
    steps = Steps((cases.requantize(1e-2),))
    for scale, score_steps in ((1e-4, Steps()), (1e-2, Steps((cases.requantize(1e-2, dtype=torch.int16),)))):
        constants = cases.softmax(scale, keys)
        for mask in cases.masks(batch, queries, keys):
            scores = cases.apply(score_steps, ops.matmul(query, key, transpose_b=1))
            weights = cases.apply_softmax(scores, mask, constants).to(torch.int8)
            expected = cases.apply(steps, ops.matmul(weights, value)).to(torch.int8)
            actual = kernels.attention(query, key, value, mask, score_steps, constants, steps, torch.int8)
            assert torch.equal(actual, expected)
            assert actual.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("bias", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("scale", cases.SCALES)
def test_norm(kernels: CpuKernels, scale: float, bias: bool) -> None:
    """Inputs of 8 to 31 bits, rows of equal values, and outliers."""
    for length in (1, 16, 50, 200):
        for limit in (127, 32767, 2**21, 2**30):
            constants = cases.norm(scale, limit, length, bias)
            x = cases.integers((11, length), torch.int32, limit=limit)
            x[0], x[1], x[2, 0] = 0, limit, limit
            x[2, 1:] = 1
            normalized = cases.apply_norm(x, constants)
            spread = max(float(normalized.double().std()) if length > 1 else 1.0, 1.0)
            outputs = [(Steps((cases.requantize(40 / spread, length),)), torch.int8), (Steps(), torch.int32)]
            actual = kernels.norm(x, Steps(), constants, outputs)
            for result, (steps, dtype) in zip(actual, outputs, strict=True):
                assert torch.equal(result, cases.apply(steps, normalized).to(dtype)), (length, limit)


def test_norm_of_a_residual_sum(kernels: CpuKernels) -> None:
    """Both operands of the residual requantized, then added and normalized."""
    x, other = cases.integers((3, 9, 70), limit=127), cases.integers((3, 9, 70), torch.int16, seed=1, limit=32000)
    before = Steps((cases.requantize(300.0, dtype=torch.int32), Add(cases.requantize(0.9, dtype=torch.int32))))
    constants, after = cases.norm(1e-4, 2**20, 70), Steps((cases.requantize(1e-6, 70),))
    [actual] = kernels.norm(x, before, constants, [(after, torch.int8)], [other])
    expected = cases.apply(after, cases.apply_norm(cases.apply(before, x, [other]), constants)).to(torch.int8)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("scale", (*cases.SCALES, 0.4))
def test_requantize(kernels: CpuKernels, scale: float) -> None:
    """All of int32 at ratios from 1e-6 to 1, one for all channels or one each, and exact ties.

    At 0.4, the shifts of some channels are below 32 and those of others are not.
    """
    x = cases.integers((130, 21), torch.int32)
    for channels in (1, 21):
        for dtype in cases.RANGES:
            steps = Steps((cases.requantize(scale, channels, dtype),))
            assert torch.equal(kernels.map(x, steps, dtype), cases.apply(steps, x).to(dtype))
    ties = torch.arange(-500, 500, dtype=torch.int32)[:, None]
    for shift in (0, 1, 31, 62):
        multiplier = torch.tensor([1 << max(shift - 1, 0) if shift < 32 else 2**31 - 1], dtype=torch.int32)
        steps = Steps((Requantize(multiplier, torch.tensor([shift], dtype=torch.int32), -(2**31), 2**31 - 1),))
        assert torch.equal(kernels.map(ties, steps, torch.int32).long(), cases.apply(steps, ties))


@pytest.mark.parametrize("scale", cases.SCALES)
def test_gelu(kernels: CpuKernels, scale: float) -> None:
    for limit in (127, 32767, 2**24):
        try:
            step = cases.gelu(scale, limit)
        except ConversionError:
            continue
        x = cases.integers((65, 40), torch.int32, limit=limit)
        x[0, :3] = torch.tensor([0, limit, -limit])
        steps = Steps((step,))
        assert torch.equal(kernels.map(x, steps, torch.int32).long(), cases.apply(steps, x))


def test_every_input_type(kernels: CpuKernels) -> None:
    steps = Steps((cases.requantize(0.3),))
    for dtype in cases.RANGES:
        x = cases.integers((3, 19), dtype)
        assert torch.equal(kernels.map(x, steps, torch.int8), cases.apply(steps, x).to(torch.int8))


def test_masks_are_shared_by_as_many_rows_as_possible() -> None:
    shape = (2, 3, 5, 20)
    for mask, rows, shared in ((None, 1, 30), (torch.ones(2, 1, 1, 20), 2, 15), (torch.ones(5, 20), 30, 1)):
        padded, rows_per_mask = mask_rows(mask, shape, torch.device("cpu"))
        assert padded.shape == (rows, 32) and rows_per_mask == shared
        assert padded[:, :20].all() and not padded[:, 20:].any()
