"""On GPU every format gives the same codes and values as on CPU, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from smelt.numerics import QuantizedTensor, get_format
from smelt.numerics.scaled import Ternary
from tests.numerics.format_names import NAMES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", NAMES)
def test_gpu_matches_cpu(name: str) -> None:
    number_format = get_format(name)
    x = torch.randn(9, 77).pow(3)
    x[2, 3], x[4, 5], x[6] = math.inf, math.nan, 0.0
    on_cpu, on_gpu = number_format.quantize(x), number_format.quantize(x.cuda())
    unpacked = QuantizedTensor.from_packed(number_format, on_gpu.pack(), 77)
    if isinstance(number_format, Ternary):  # a mean depends on the order of its sum
        torch.testing.assert_close(on_gpu.dequantize().cpu(), on_cpu.dequantize(), equal_nan=True)
    else:
        assert torch.equal(on_gpu.codes.cpu(), on_cpu.codes)
        assert torch.equal(on_gpu.dequantize().cpu().nan_to_num(nan=1e9), on_cpu.dequantize().nan_to_num(nan=1e9))
    assert torch.equal(unpacked.dequantize().nan_to_num(nan=1e9), on_gpu.dequantize().nan_to_num(nan=1e9))


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_captured_in_a_graph(name: str) -> None:
    """Nothing synchronizes with the device once the tables exist."""
    number_format, x = get_format(name), torch.randn(4, 64, device="cuda")
    expected = number_format.fake_quantize(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rounded = number_format.fake_quantize(x)
    graph.replay()
    assert torch.equal(rounded, expected)
