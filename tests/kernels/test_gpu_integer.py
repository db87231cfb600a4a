"""Triton kernels of integer-only networks, with the bits of the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (chooses the interpreter)
from smelt.kernels.gpu.integer import TILES, GpuKernels, Tile, tile_for
from smelt.kernels.gpu.integer_chain import prepare
from smelt.kernels.integer import integer_kernels
from smelt.kernels.integer_interface import Add, NormConstants, Requantize, Steps, Tanh
from smelt.runtime.integer import ops
from smelt.runtime.integer.constants import tanh_constants
from smelt.runtime.integer.fused import FusedProgram
from smelt.runtime.integer.kernel_call import LinearCall
from smelt.runtime.integer.run import Interpreter
from tests.kernels import integer_cases as cases
from tests.runtime.integer.encoder_graph import random_encoder, token_batch

KERNELS = GpuKernels()


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("shape", [(3, 5, 7), (70, 33, 130), (17, 64, 256), (0, 4, 4)], ids=str)
def test_linear(shape: tuple[int, int, int]) -> None:
    """Whole and partial tiles, and every chain of steps."""
    rows, channels, columns = shape
    x, weight = cases.integers((rows, columns)), cases.integers((channels, columns), seed=1)
    bias = cases.integers((channels,), torch.int32, seed=2, limit=100_000)
    packed = KERNELS.pack(weight.to(DEVICE))
    for steps, dtype in cases.chains(channels, columns):
        for given in (None, bias):
            expected = cases.apply(steps, ops.linear(x, weight=weight, bias=given)).to(dtype)
            on_device = None if given is None else given.to(DEVICE)
            assert same(KERNELS.linear(x.to(DEVICE), packed, on_device, steps, dtype), expected)


def test_steps_beyond_one_chain() -> None:
    """Residuals with fewer rows than the result, and more steps than a kernel has places for."""
    x, weight = cases.integers((2, 9, 40)), cases.integers((50, 40), seed=1)
    others = [cases.integers(shape, torch.int16, seed=3, limit=100) for shape in ((2, 9, 50), (9, 50), (50,))]
    wide = cases.requantize(0.7, 50, torch.int32)
    first = cases.requantize(1e-2, 50, torch.int32)
    steps = Steps((first, Add(wide), Add(), Add(cases.requantize(0.7, dtype=torch.int32)), cases.requantize(0.1), wide))
    expected = cases.apply(steps, ops.linear(x, weight=weight), others).to(torch.int32)
    packed, operands = KERNELS.pack(weight.to(DEVICE)), [other.to(DEVICE) for other in others]
    assert same(KERNELS.linear(x.to(DEVICE), packed, None, steps, torch.int32, operands), expected)
    with pytest.raises(ValueError, match="more operands than the 0 given"):
        KERNELS.linear(x.to(DEVICE), packed, None, steps, torch.int32)


@pytest.mark.parametrize("transpose_b", [False, True])
def test_matmul(transpose_b: bool) -> None:
    a = cases.integers((2, 17, 3, 20)).transpose(1, 2)
    b = cases.integers((2, 33, 3, 20) if transpose_b else (2, 20, 3, 33), seed=1).transpose(1, 2)
    for steps, dtype in ((Steps(), torch.int32), (Steps((cases.requantize(1e-3),)), torch.int8)):
        expected = cases.apply(steps, ops.matmul(a, b, transpose_b=int(transpose_b))).to(dtype)
        assert same(KERNELS.matmul(a.to(DEVICE), b.to(DEVICE), transpose_b, steps, dtype), expected)


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-3, 1e-1])
def test_softmax(scale: float) -> None:
    """Scores of all magnitudes, in 32 and in 64 bits."""
    for length in (1, 37):
        constants = cases.softmax(scale, length)
        for limit in (min(max(int(20 / scale), 4), 2**31 - 1), None):
            x = cases.integers((2, 1, 5, length), torch.int32, limit=limit)
            for mask in cases.masks(2, 5, length):
                expected = cases.apply_softmax(x, mask, constants).to(torch.int8)
                on_device = None if mask is None else mask.to(DEVICE)
                assert same(KERNELS.softmax(x.to(DEVICE), on_device, Steps(), constants, torch.int8), expected)


@pytest.mark.parametrize("max_keys", [512, 8], ids=["fused", "three kernels"])
def test_attention(monkeypatch: pytest.MonkeyPatch, max_keys: int) -> None:
    monkeypatch.setattr("smelt.kernels.gpu.integer.MAX_ATTENTION_KEYS", max_keys)
    batch, heads, queries, keys, head_dim = 2, 3, 20, 21, 33
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
            tensors = [tensor.to(DEVICE) for tensor in (query, key, value)]
            on_device = None if mask is None else mask.to(DEVICE)
            assert same(KERNELS.attention(*tensors, on_device, score_steps, constants, steps, torch.int8), expected)


@pytest.mark.parametrize("bias", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_norm(scale: float, bias: bool) -> None:
    """Inputs of 8 to 31 bits, rows of equal values, outliers, a residual, and one or two results."""
    for length in (1, 50):
        for limit in (127, 2**21, 2**30):
            constants = cases.norm(scale, limit, length, bias)
            x = cases.integers((5, length), torch.int32, limit=limit // 2)
            other = cases.integers((5, length), torch.int32, seed=1, limit=limit // 2)
            x[0] = other[0] = 0
            x[1], other[1] = limit // 2, limit // 2
            before = Steps((Add(cases.requantize(0.5, dtype=torch.int32)),))
            normalized = cases.apply_norm(cases.apply(before, x, [other]), constants)
            spread = max(float(normalized.double().std()) if length > 1 else 1.0, 1.0)
            after = Steps((cases.requantize(40 / spread, length),))
            outputs = [(after, torch.int8), (Steps(), torch.int32)]
            on_device = norm_to(constants)
            for count in (1, 2):
                actual = KERNELS.norm(x.to(DEVICE), before, on_device, outputs[:count], [other.to(DEVICE)])
                for result, (steps, dtype) in zip(actual, outputs, strict=False):
                    assert same(result, cases.apply(steps, normalized).to(dtype)), (length, limit)


def norm_to(constants: NormConstants) -> NormConstants:
    bias = None if constants.bias is None else constants.bias.to(DEVICE)
    return replace(constants, weight=constants.weight.to(DEVICE), bias=bias)


@pytest.mark.parametrize("scale", cases.SCALES)
def test_requantize(scale: float) -> None:
    x = cases.integers((60, 21), torch.int32)
    for channels in (1, 21):
        for dtype in cases.RANGES:
            steps = Steps((cases.requantize(scale, channels, dtype),))
            assert same(KERNELS.map(x.to(DEVICE), steps, dtype), cases.apply(steps, x).to(dtype))


def test_a_whole_encoder() -> None:
    graph = random_encoder(layers=1, width=48, heads=3, inner=70)
    inputs = token_batch(2, 11)
    expected = Interpreter(graph).run(inputs)
    for node in graph.nodes:
        node.constants.update({name: tensor.to(DEVICE) for name, tensor in node.constants.items()})
    actual = FusedProgram(graph, KERNELS).run({name: tensor.to(DEVICE) for name, tensor in inputs.items()})
    assert all(same(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_splits_and_descriptors(monkeypatch: pytest.MonkeyPatch, splits: int, tma: bool) -> None:
    """Tiles whose columns are requantized in parts; operands that the copy engine fetches, with zeros at the end."""
    rows, channels, columns = 70, 37, 176
    monkeypatch.setitem(TILES, (rows, channels, columns), Tile(64, 64, 128, 4, 2, tma, splits))
    x, weight = cases.integers((rows, columns)), cases.integers((channels, columns), seed=1)
    packed = KERNELS.pack(weight.to(DEVICE))
    for steps, dtype in cases.chains(channels, columns):
        expected = cases.apply(steps, ops.linear(x, weight=weight)).to(dtype)
        assert same(KERNELS.linear(x.to(DEVICE), packed, None, steps, dtype), expected)


@pytest.mark.parametrize("shift", [1, 30, 31, 32, 33, 34, 62])
@pytest.mark.parametrize("limit", [127, 2**22, 2**31 - 1])
def test_requantize_rounds_and_clamps(shift: int, limit: int) -> None:
    """Every arithmetic at its limits: extreme values, ties, and results that leave 32 bits before they are clamped."""
    edges = [-(2**31), -(2**31) + 1, -limit - 1, -limit, -3, -2, -1, 0, 1, 2, 3, limit, 2**31 - 2, 2**31 - 1]
    around = [(2 * k + 1) * 2**shift // 2**31 + d for k in (-2, -1, 0, 1, 126, 127) for d in (-1, 0, 1)]  # ties
    x = torch.tensor([edges + [min(max(value, -(2**31)), 2**31 - 1) for value in around]], dtype=torch.int32).T
    for multiplier in (2**30, 2**30 + 1, 2**31 - 1):
        for channels in (1, 2):
            numbers = [torch.full((channels,), number, dtype=torch.int32) for number in (multiplier, shift)]
            numbers[1][-1] = min(shift + channels - 1, 62)
            steps, values = Steps((Requantize(*numbers, -limit, limit),)), x.expand(-1, channels).contiguous()
            assert same(KERNELS.map(values.to(DEVICE), steps, torch.int32), cases.apply(steps, values).to(torch.int32))


def test_arithmetic_follows_the_constants() -> None:
    """32 bits are used where they are enough."""
    forms = {
        (40, 127): 1 + 6, (33, 2**31 - 1): 1 + 6 + 8, (32, 127): 1 + 2, (28, 2**22): 1 + 4, (31, 2**31 - 1): 1,
        (0, 9): 1,
    }  # fmt: skip
    for (shift, limit), form in forms.items():
        numbers = [torch.tensor([number], dtype=torch.int32) for number in (2**30, shift)]
        assert prepare(Steps((Requantize(*numbers, -limit, limit),)), torch.device("cpu"))[0].form == form, shift


def test_tanh() -> None:
    graph_tanh = Tanh(**tanh_constants(1e-4, "layer")[0])
    x = cases.integers((7, 30), torch.int16)
    expected = ops.tanh(x, **vars(graph_tanh)).to(torch.int8)
    assert same(KERNELS.map(x.to(DEVICE), Steps((graph_tanh,)), torch.int8), expected)


def test_layers_with_the_same_input_are_joined() -> None:
    """Query, key and value are one product, whose parts are views."""
    program = FusedProgram(random_encoder(layers=2, width=48, heads=3, inner=70), KERNELS)
    joined = [call for call in program.calls if isinstance(call, LinearCall) and len(call.outputs) == 3]
    assert [call.sizes for call in joined] == [(48, 48, 48)] * 2


def test_tiles_follow_the_shape() -> None:
    assert tile_for(1, 4096, 768, 768) == Tile(128, 128, 128, 4, 3, splits=4)
    assert tile_for(1, 128, 768, 768) == Tile(64, 64, 128, 4, 4)
    assert tile_for(1, 1, 768, 20) == Tile(16, 64, 32, 4, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "length"), [(1, 128), (32, 128), (3, 300), (1, 600)])
def test_a_gpu_uses_the_kernels(batch: int, length: int) -> None:
    """BERT-base shape: large tiles, and rows of keys of all sizes."""
    assert isinstance(integer_kernels("cuda"), GpuKernels)
    graph = random_encoder(layers=1, width=768, heads=12, inner=3072, positions=1024)
    inputs = token_batch(batch, length)
    inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
    for node in graph.nodes:
        node.constants.update({name: tensor.cuda() for name, tensor in node.constants.items()})
    expected = Interpreter(graph).run(inputs)
    actual = Interpreter(graph, "gpu").run(inputs)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
