"""FP8 with chunk-based accumulation: products to the bit, convolutions against autograd, updates, accumulator bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smelt.errors import ConfigError, ModelError
from smelt.kernels.emulated_gemm import emulated_matmul, emulated_sum
from smelt.numerics.float_format import DLFLOAT16, FP8_E5M2_IBM, FloatFormat
from smelt.train.fp8.chunked import FP8, FP16, ChunkedGemm, convert_to_chunked_training, predicted_bits
from smelt.train.fp8.gemm_flops import count_gemm_flops
from smelt.train.fp8.optimizer import Fp16AdamW, Fp16Rounding, Fp16SGD
from smelt.train.fp8.settings import AccumulatorBits, ChunkedSettings
from tests.train.parallel import run

WIDE = ChunkedSettings(chunk_size=None, accumulator_bits=AccumulatorBits(23, 23, 23))


def values(*shape: int, seed: int = 0) -> Tensor:
    """Return small integers over 4: exact in FP8, and so are their sums in wide accumulators."""
    return torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(seed)).float() / 4


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), nn.Flatten(), nn.Linear(8 * 16, 5),
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": 1, "stride": 2},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": (2, 3), "padding": (0, 2), "stride": (3, 1), "dilation": (1, 2)},
        {"kernel_size": 2, "padding": 1, "stride": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(8, 8), (9, 7)])
def test_the_three_gemms_of_a_convolution_are_those_of_autograd(options: dict[str, Any], size: tuple[int, int]) -> None:
    """Operands that FP8 represents and wide accumulators: nothing is rounded."""
    conv = nn.Conv2d(3, 4, bias=False, **options)
    weight, x = values(*conv.weight.shape).requires_grad_(), values(2, 3, *size, seed=1).requires_grad_()
    expected = nn.functional.conv2d(x, weight, None, conv.stride, conv.padding, conv.dilation)
    grad = values(*expected.shape, seed=2)
    exact = torch.autograd.grad(expected, (x, weight), grad)
    y = ChunkedGemm(WIDE).conv2d(x, weight, conv)
    assert torch.equal(y, expected)
    for actual, wanted in zip(torch.autograd.grad(y, (x, weight), grad), exact, strict=True):
        assert torch.equal(actual, wanted)


def test_the_three_gemms_of_a_linear_layer_are_emulated_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in ((96, 130), (40, 130), (96, 40)))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    settings = ChunkedSettings(chunk_size=32, accumulator_bits=AccumulatorBits(forward=9, backward=6, gradient=7))
    y = ChunkedGemm(settings).linear(x, weight)
    y.backward(grad)

    def product(a: Tensor, b: Tensor, bits: int) -> Tensor:
        accumulator = FloatFormat(6, bits, special="nan", subnormals=False)
        return emulated_matmul(a, b, accumulator, 32, operands=FP8_E5M2_IBM)

    assert torch.equal(y, product(x, weight.t(), 9))
    assert x.grad is not None and torch.equal(x.grad, product(grad, weight, 6))
    assert weight.grad is not None and torch.equal(weight.grad, product(grad.t(), x, 7))


def test_formats_and_flops_of_a_network() -> None:
    network = convolutional()
    training = convert_to_chunked_training(network, ChunkedSettings())
    gemms: list[Any] = [network[index].gemm for index in (0, 3, 5)]
    assert [(gemm.inputs, gemm.others) for gemm in gemms] == [(FP16, FP8), (FP8, FP8), (FP16, FP16)]
    assert [gemm.accumulator_bits("forward", 64) for gemm in gemms] == [9, 9, 9]
    for parameter in network.parameters():
        assert torch.equal(parameter, FP16.round(parameter))
    outputs = {}
    for index in (0, 1, 3, 5):
        network[index].register_forward_hook(lambda module, inputs, y, index=index: outputs.update({index: y}))
    flops = count_gemm_flops(lambda: network(torch.randn(2, 3, 8, 8)).sum().backward())
    for y in outputs.values():
        assert torch.equal(y, FP16.round(y))
    first, second, head = 2 * 2 * 64 * 8 * 27, 2 * 2 * 16 * 8 * 72, 2 * 2 * 5 * 128
    # No backward GEMM of the first layer; that of the strided one is over the dilated gradient, 4 times as large.
    assert flops["gemm_flops"] == 2 * first + (2 + 4) * second + 3 * head and flops["emulated"] == 1
    training.restore()
    assert type(network[3]) is nn.Conv2d and len(network[1]._forward_hooks) == 1  # that of this test


def test_a_layer_that_cannot_be_converted_is_named() -> None:
    network = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Linear(4, 4))
    with pytest.raises(ModelError, match="fp8-chunked covers every GEMM, and 0 cannot be converted: groups"):
        convert_to_chunked_training(network, ChunkedSettings())
    with pytest.raises(ModelError, match="no linear layer or convolution"):
        convert_to_chunked_training(nn.Sequential(nn.ReLU()), ChunkedSettings())
    with pytest.raises(ConfigError, match="chunk_size is 0; it must be at least 1, or null"):
        ChunkedSettings(chunk_size=0)
    with pytest.raises(ConfigError, match=r"accumulator_bits\.backward is 24"):
        AccumulatorBits(backward=24)


def test_accumulator_bits_follow_the_prediction() -> None:
    """The values of the card: 25,088 terms need 10 bits, in chunks of 64 only 6."""
    bits = AccumulatorBits(forward=8, backward=None, gradient=None)
    plain = ChunkedGemm(ChunkedSettings(chunk_size=None, accumulator_bits=bits, bits_below_prediction=3))
    assert predicted_bits(25_088, None) == 10 and predicted_bits(25_088, 64) == 6
    assert plain.accumulator_bits("gradient", 25_088) == 7
    assert plain.accumulator_bits("backward", 144) == 2 and plain.accumulator_bits("forward", 25_088) == 8
    chunked = ChunkedGemm(ChunkedSettings(accumulator_bits=bits))
    assert chunked.accumulator_bits("gradient", 25_088) == 6
    first = ChunkedGemm(ChunkedSettings(accumulator_bits=bits), inputs=FP16)
    assert first.accumulator_bits("gradient", 25_088) == 9 and first.accumulator_bits("backward", 144) == 5


def test_a_sum_in_fp16_stalls_without_chunks_only() -> None:
    x = DLFLOAT16.round(1 + math.sqrt(12) * (torch.rand(65536, generator=torch.Generator().manual_seed(0)) - 0.5))
    assert float(emulated_sum(x, DLFLOAT16)) == 4096.0
    assert abs(float(emulated_sum(x, DLFLOAT16, 64)) / float(x.double().sum()) - 1) < 0.02


def test_stochastic_rounding_is_unbiased_and_repeats_with_seed_and_step() -> None:
    """1 + 0.3 steps: rounded up with probability 0.3, within 3 standard deviations."""
    step, count = 2.0**-9, 100_000
    rounding = Fp16Rounding(seed=3, stochastic=True)
    rounding.start_step(1)
    x = torch.full((count,), 1 + 0.3 * step)
    first, second = rounding(x), rounding(x)
    assert sorted(set(first.tolist())) == [1.0, 1 + step]
    for rounded in (first, second):
        share = float((rounded > 1).double().mean())
        assert abs(share - 0.3) < 3 * math.sqrt(0.3 * 0.7 / count)
    assert not torch.equal(first, second)
    repeated = Fp16Rounding(seed=3, stochastic=True)
    repeated.start_step(1)
    assert torch.equal(repeated(x), first)
    repeated.start_step(2)
    assert not torch.equal(repeated(x), first)


def test_small_updates_are_lost_to_nearest_and_kept_stochastically() -> None:
    """1000 updates of an eighth of a step of (1,6,9): a weight of 1 should fall by 0.244."""
    results = {}
    for stochastic in (False, True):
        weight = nn.Parameter(torch.ones(1000))
        optimizer = Fp16SGD([weight], Fp16Rounding(0, stochastic=stochastic), lr=1.0)
        for _ in range(1000):
            weight.grad = torch.full_like(weight, 2.0**-9 / 8)
            optimizer.step()
        results[stochastic] = float(weight.detach().mean())
    assert results[False] == 1.0 and abs(results[True] - (1 - 1000 * 2.0**-9 / 8)) < 2e-3


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_in_fp16_is_sgd_where_nothing_is_rounded(nesterov: bool) -> None:
    """Powers of two as rate, momentum and decay."""
    options: dict[str, Any] = {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25, "nesterov": nesterov}
    weights = [nn.Parameter(torch.tensor([8.0, -4.0])) for _ in range(2)]
    optimizers = [torch.optim.SGD(weights[:1], **options),
                  Fp16SGD(weights[1:], Fp16Rounding(0, stochastic=True), **options)]  # fmt: skip
    for _ in range(2):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.tensor([4.0, 2.0])
            optimizer.step()
    assert torch.equal(weights[0], weights[1])
    assert optimizers[1].state[weights[1]]["step"] == 2  # checkpoints keep it: random bits follow from it


def _weights_of_rank() -> list[float]:
    torch.manual_seed(torch.distributed.get_rank())  # as the trainer does: dropout differs between ranks
    weight = nn.Parameter(torch.ones(100))
    optimizer = Fp16SGD([weight], Fp16Rounding(0, stochastic=True), lr=1.0)
    for _ in range(3):
        weight.grad = torch.full_like(weight, 2.0**-11)
        optimizer.step()
    values: list[float] = weight.tolist()
    return values


def test_ranks_round_alike() -> None:
    first, second = run(2, _weights_of_rank)
    assert first == second and len(set(first)) > 1


def test_adamw_keeps_weights_in_fp16() -> None:
    weight = nn.Parameter(DLFLOAT16.round(torch.randn(100)))
    optimizer = Fp16AdamW([weight], Fp16Rounding(0, stochastic=True), lr=1e-2)
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weight, DLFLOAT16.round(weight.detach()))
    assert abs(float((before - weight.detach()).mean()) - 1e-2) < 1e-3


def test_a_network_learns() -> None:
    network = convolutional()
    convert_to_chunked_training(network, ChunkedSettings())
    optimizer = Fp16SGD(network.parameters(), Fp16Rounding(0, stochastic=True), lr=0.05, momentum=0.9)
    x, labels = torch.randn(15, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(15) % 5
    for _ in range(15):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), labels)
        (1000 * loss).backward()
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad /= 1000
        optimizer.step()
    assert float(loss.detach()) < 0.5
