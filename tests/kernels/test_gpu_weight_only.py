"""Triton products with a packed matrix and half-precision inputs, against float64 and the reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, HALF, TOLERANCE, distance  # isort: skip  (chooses the interpreter)
from smelt.kernels.gpu import launch
from smelt.kernels.gpu.linear import WeightOnly
from smelt.kernels.gpu.matrix import describe
from smelt.kernels.linear import REFERENCE, PackedMatrix
from smelt.numerics import QuantizedTensor, get_format

KERNEL = WeightOnly()
WORDS = (
    "int4/32@float16",
    "int4-asym/64@float16",
    "int4-float-zero/32",
    "int4-float32-zero/32@float16",
    "int8/32",
    "int8-asym/row@bfloat16",
)
OTHERS = ("int2/64", "int3/32", "int5/64", "int4/tensor", "mxfp4", "nvfp4", "amxfp4", "fp4")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small tiles: the interpreter's time grows with the number of programs, padding included."""
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "gemv_config", lambda matrix: (4, 2, 1))
        monkeypatch.setattr(launch, "gemm_config", lambda batch, matrix, integer: (16, 16, 4, 1))


def packed(name: str, rows: int, columns: int) -> tuple[PackedMatrix, QuantizedTensor]:
    number_format = get_format(name)
    quantized = number_format.quantize(torch.randn(rows, columns, device=DEVICE) * 0.1)
    return PackedMatrix(number_format, rows, columns, quantized.pack()), quantized


def check(name: str, batch: int, rows: int, columns: int, path: str) -> None:
    matrix, quantized = packed(name, rows, columns)
    assert launch.weight_only_path(batch, describe(matrix)) == path
    x = torch.randn(batch, columns, device=DEVICE, dtype=HALF)
    result = KERNEL.run(x, matrix, None, None, KERNEL.prepare(matrix, None))
    assert result.dtype == HALF
    assert distance(result, x.double() @ quantized.dequantize().double().T) < TOLERANCE[HALF]


@pytest.mark.parametrize("name", WORDS + OTHERS)
def test_one_vector(name: str) -> None:
    check(name, 1, 3, 96, "gemv")  # more chunks than a tile, and rows that do not fill one


@pytest.mark.parametrize("name", [*WORDS, *(name for name in OTHERS if name not in ("int3/32", "int5/64"))])
def test_several_vectors(name: str) -> None:
    check(name, 5, 20 if name == "int4/32@float16" else 11, 160, "gemm")


@pytest.mark.parametrize("name", ["int4/32", "int3/32", "dint4", "nf4", "mxfp6-e3m2", "ternary", "amxfp4", "fp8-e4m3"])
def test_the_full_matrix_is_dequantized(name: str) -> None:
    matrix, quantized = packed(name, 5, 70)
    assert torch.equal(launch.dequantize(describe(matrix), torch.float32), quantized.dequantize())


@pytest.mark.parametrize(("name", "columns"), [("int4/32", 70), ("mxfp4", 33), ("int3/row", 50), ("nf4", 64)])
def test_columns_that_do_not_fill_a_chunk(name: str, columns: int) -> None:
    check(name, 1, 7, columns, "gemm" if name in ("int4/32", "mxfp4") else "expand")


def test_split_k() -> None:
    matrix, quantized = packed("int4-asym/32", 20, 160)
    x, bias = torch.randn(3, 160, device=DEVICE, dtype=HALF), torch.randn(20, device=DEVICE, dtype=HALF)
    result = launch.gemm(x, describe(matrix), bias, None, HALF, tiles=(16, 16, 4, 1), split=3)
    assert distance(result, x.double() @ quantized.dequantize().double().T + bias.double()) < TOLERANCE[HALF]


def test_inputs_of_any_shape_and_stride_with_a_bias() -> None:
    matrix, quantized = packed("int4/32@float16", 5, 64)
    wide = torch.randn(2, 64, 3, device=DEVICE, dtype=HALF)
    bias = torch.randn(5, device=DEVICE, dtype=HALF)
    for x in (wide.transpose(1, 2), wide[:, :, :1].transpose(1, 2), torch.randn(64, device=DEVICE, dtype=HALF)):
        result = KERNEL.run(x, matrix, None, bias, KERNEL.prepare(matrix, None))
        assert result.shape == (*x.shape[:-1], 5)
        assert distance(result, x.double() @ quantized.dequantize().double().T + bias.double()) < TOLERANCE[HALF]


def test_an_empty_batch_gives_an_empty_result() -> None:
    matrix, _ = packed("int4/32", 12, 64)
    empty = torch.empty(0, 64, device=DEVICE, dtype=HALF)
    assert KERNEL.run(empty, matrix, None, None, KERNEL.prepare(matrix, None)).shape == (0, 12)


def test_a_broken_group_makes_its_rows_nan_and_no_others() -> None:
    for name in ("int4/32@float16", "mxfp4"):
        number_format = get_format(name)
        weight = torch.randn(6, 64, device=DEVICE)
        weight[2, 40] = float("nan")
        matrix = PackedMatrix(number_format, 6, 64, number_format.quantize(weight).pack())
        for batch in (1, 3):
            x = torch.randn(batch, 64, device=DEVICE, dtype=HALF)
            result = KERNEL.run(x, matrix, None, None, KERNEL.prepare(matrix, None))
            assert torch.equal(result.isnan(), REFERENCE.run(x, matrix, None, None, None).isnan())


def test_large_and_small_inputs_keep_their_precision() -> None:
    matrix, quantized = packed("int4/32", 4, 64)
    for factor in (1e-3, 1e3):
        x = (torch.randn(1, 64, device=DEVICE) * factor).to(HALF)
        result = KERNEL.run(x, matrix, None, None, KERNEL.prepare(matrix, None))
        assert distance(result, x.double() @ quantized.dequantize().double().T) < TOLERANCE[HALF]


def test_float32_or_quantized_inputs_are_left_to_other_kernels() -> None:
    matrix, _ = packed("int4/32", 8, 64)
    assert KERNEL.supports(matrix, None, HALF)
    assert not KERNEL.supports(matrix, None, torch.float32)


@pytest.mark.gpu
def test_a_layer_uses_the_kernel_compiled_and_captured() -> None:
    from smelt.models.quantization_scheme import QuantizationScheme
    from smelt.models.quantized import QuantizedLinear

    for name in ("int4/128@float16", "mxfp4"):
        number_format = get_format(name)
        quantized = number_format.quantize(torch.randn(512, 1024, device="cuda") * 0.1)
        layer = QuantizedLinear.from_quantized(
            quantized, QuantizationScheme(number_format), bias=None, dtype=torch.bfloat16
        ).cuda()
        compiled = torch.compile(layer, fullgraph=False)
        for batch in (1, 16, 200):
            x = torch.randn(batch, 1024, device="cuda", dtype=torch.bfloat16)
            expected = x.double() @ quantized.dequantize().double().T
            assert distance(layer(x), expected) < TOLERANCE[torch.bfloat16]
            assert layer.backend == KERNEL.name
            assert torch.equal(compiled(x), layer(x))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                actual = layer(x)
            x.copy_(torch.randn_like(x))
            actual.fill_(float("nan"))
            graph.replay()
            assert distance(actual, x.double() @ quantized.dequantize().double().T) < TOLERANCE[torch.bfloat16]
