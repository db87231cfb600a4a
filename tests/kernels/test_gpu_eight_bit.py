"""Triton products with inputs quantized to 8 bits, against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, HALF, TOLERANCE, distance  # isort: skip  (chooses the interpreter)
from smelt.kernels.gpu import launch
from smelt.kernels.gpu.linear import EightBit
from smelt.kernels.gpu.matrix import describe
from smelt.kernels.linear import ActivationQuant, PackedMatrix
from smelt.numerics import get_format

KERNEL = EightBit()
INT8 = get_format("int8")
NAMES = ["int8/row", "int8-asym/row", "int8/32", "int4/row", "int4-asym/row", "int4-asym/64", "dint4", "dint4-sym/64"]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "gemm_config", lambda batch, matrix, integer: (16, 16, 4, 1))


def packed(name: str, rows: int, columns: int) -> PackedMatrix:
    number_format = get_format(name)
    quantized = number_format.quantize(torch.randn(rows, columns, device=DEVICE) * 0.1)
    return PackedMatrix(number_format, rows, columns, quantized.pack())


def expected(x: torch.Tensor, matrix: PackedMatrix, inputs: ActivationQuant) -> torch.Tensor:
    return inputs.fake_quantize(x.float()).double() @ matrix.unpack().dequantize().double().T


@pytest.mark.parametrize("path", ["gemm", "expand"])
@pytest.mark.parametrize("name", NAMES)
def test_matches_the_product_of_quantized_inputs(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, inputs = packed(name, 11, 128), ActivationQuant(INT8)
    if path == "expand":
        monkeypatch.setattr(launch, "INT8_BATCH", 0)
        if matrix.format.bits == 8:
            pytest.skip("8-bit codes are never written out")
    assert KERNEL.supports(matrix, inputs, HALF)
    assert launch.eight_bit_path(6, describe(matrix)) == path
    x = torch.randn(2, 3, 128, device=DEVICE, dtype=HALF)
    bias = torch.randn(11, device=DEVICE, dtype=HALF)
    actual = KERNEL.run(x, matrix, inputs, bias, KERNEL.prepare(matrix, inputs))
    assert distance(actual, expected(x, matrix, inputs) + bias.double()) < TOLERANCE[HALF]


def test_inputs_are_quantized_exactly_as_the_format_does() -> None:
    x = torch.randn(6, 100, device=DEVICE, dtype=HALF)
    x[1, 3], x[2, 4], x[2, 5], x[3] = float("nan"), float("inf"), float("-inf"), 0
    names = ["int8", "int8@float16"] + ["int8@bfloat16"] * (DEVICE == "cuda")  # the interpreter truncates
    for number_format in map(get_format, names):
        codes, scales = launch.quantize_rows(x, torch.int8, 127.0, number_format.scale_dtype)
        # on CPU: on GPU, PyTorch divides by a scalar by multiplying with its inverse
        actual, reference = (codes * scales[:, None]).cpu(), number_format.fake_quantize(x.cpu().float())
        assert torch.equal(actual.nan_to_num(7.0), reference.nan_to_num(7.0))
        assert actual.isnan().any(-1).tolist() == [False, True, False, False, False, False]


def test_rows_longer_than_a_tile_are_quantized_the_same() -> None:
    x = torch.randn(1, 20000, device=DEVICE, dtype=HALF)
    codes, scales = launch.quantize_rows(x, torch.int8, 127.0, "float32")
    assert torch.equal((codes * scales[:, None]).cpu(), INT8.fake_quantize(x.cpu().float()))


def test_a_clipped_range_and_a_static_scale() -> None:
    matrix = packed("int8/row", 16, 64)
    x = torch.randn(3, 64, device=DEVICE, dtype=HALF)
    for inputs in (
        ActivationQuant(INT8, clip_ratio=0.7),
        ActivationQuant(INT8, scale=torch.full((1, 1, 1), 0.013, device=DEVICE)),
    ):
        assert KERNEL.supports(matrix, inputs, HALF)
        actual = KERNEL.run(x, matrix, inputs, None, KERNEL.prepare(matrix, inputs))
        assert distance(actual, expected(x, matrix, inputs)) < TOLERANCE[HALF]


def test_unsupported_formats_are_left_to_other_kernels() -> None:
    matrix = packed("int4/row", 16, 64)
    for name in ("int8-asym", "int8/32", "int4", "mxfp8-e4m3", "int8@e4m3"):
        assert not KERNEL.supports(matrix, ActivationQuant(get_format(name)), HALF)
    for name in ("int4/32", "int3/row", "int4-float-zero", "dint8", "mxfp4"):  # 32: half of the tile of an int8 product
        assert not KERNEL.supports(packed(name, 16, 64), ActivationQuant(INT8), HALF)


def test_an_empty_batch_gives_an_empty_result() -> None:
    matrix, inputs = packed("int8/row", 16, 64), ActivationQuant(INT8)
    empty = torch.empty(0, 64, device=DEVICE, dtype=HALF)
    assert KERNEL.run(empty, matrix, inputs, None, KERNEL.prepare(matrix, inputs)).shape == (0, 16)


@pytest.mark.gpu
def test_e4m3_uses_pytorchs_own_product() -> None:
    number_format = get_format("fp8-e4m3")
    inputs = ActivationQuant(number_format)
    for rows, columns in ((512, 1024), (48, 80)):
        matrix = packed("fp8-e4m3", rows, columns)
        assert KERNEL.supports(matrix, inputs, torch.bfloat16)
        assert launch.eight_bit_path(16, describe(matrix)) == "scaled_mm"
        for batch in (1, 16, 300):
            x = torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16)
            actual = KERNEL.run(x, matrix, inputs, None, KERNEL.prepare(matrix, inputs))
            assert distance(actual, expected(x, matrix, inputs)) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_large_products_captured_in_a_graph() -> None:
    for name in ("int8/row", "int4/row", "dint4"):
        matrix, inputs = packed(name, 1000, 1088), ActivationQuant(INT8)
        prepared = KERNEL.prepare(matrix, inputs)
        for batch in (16, 500, 1500):
            x = torch.randn(batch, 1088, device="cuda", dtype=torch.bfloat16)
            KERNEL.run(x, matrix, inputs, None, prepared)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                actual = KERNEL.run(x, matrix, inputs, None, prepared)
            x.copy_(torch.randn_like(x))
            actual.fill_(float("nan"))
            graph.replay()
            assert distance(actual, expected(x, matrix, inputs)) < TOLERANCE[torch.bfloat16]
