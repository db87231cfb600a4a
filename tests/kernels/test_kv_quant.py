"""Quantized KV cache rows: a row reads back as written, within the precision of the format."""

from __future__ import annotations

import pytest
import torch

from smelt.kernels.kv_quant import INT4, INT8, KV_QUANT_DTYPES, KVQuantFormat
from smelt.numerics.catalog import get_format
from smelt.numerics.format import Format

CATALOGUE = {
    "int8": "int8",
    "fp8": "fp8-e4m3",
    "int4": "int4-asym/row@float16",
}  # the same formats in the reference implementation


def reference(name: str, x: torch.Tensor) -> torch.Tensor:
    number: Format = get_format(CATALOGUE[name])
    return number.quantize(x).dequantize()


@pytest.mark.parametrize("name", KV_QUANT_DTYPES)
@pytest.mark.parametrize("width", [16, 24, 64, 96, 128])
def test_rows_match_the_catalog_format(name: str, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, width) * torch.logspace(-3, 3, 50)[:, None, None]
    rows = KVQuantFormat(name, width)
    packed = rows.quantize(x)
    assert packed.shape == (50, 3, rows.row_bytes) and packed.dtype == torch.uint8
    assert (
        rows.row_bytes == {"int8": width + 4, "fp8": width + 4, "int4": (1 << (width - 1).bit_length()) // 2 + 4}[name]
    )
    actual = rows.dequantize(packed)
    step = actual.abs().amax(-1, keepdim=True) / 100
    expected = reference(name, x.flatten(0, 1)).view_as(x)
    assert float(((actual - expected).abs() > 2 * step).float().mean()) < 0.002  # except ties
    assert float((actual - x).norm() / x.norm()) < {"int8": 0.01, "fp8": 0.04, "int4": 0.12}[name]


@pytest.mark.parametrize("name", KV_QUANT_DTYPES)
def test_rows_of_zeros_and_of_one_sign(name: str) -> None:
    rows = KVQuantFormat(name, 32)
    assert not bool(rows.dequantize(rows.quantize(torch.zeros(2, 32))).any())
    positive = 5 + torch.rand(4, 32)
    assert float((rows.dequantize(rows.quantize(positive)) - positive).abs().max()) < {INT8: 0.03, INT4: 0.21}.get(
        name, 0.25
    )


def test_the_hadamard_transform_keeps_products_and_spreads_outliers() -> None:
    torch.manual_seed(1)
    rows = KVQuantFormat.for_head_dim(INT4, 64)
    assert (
        rows.hadamard
        and not KVQuantFormat.for_head_dim(INT4, 96).hadamard
        and not KVQuantFormat.for_head_dim(INT8, 64).hadamard
    )
    queries, keys = torch.randn(20, 64), torch.randn(30, 64)
    keys[:, 3] += 25  # an outlier channel
    expected = queries @ keys.T
    assert torch.allclose(rows.rotate(queries) @ rows.rotate(keys).T, expected, atol=1e-3)
    assert torch.allclose(rows.unrotate(rows.rotate(keys)), keys, atol=1e-4)
    plain = KVQuantFormat(INT4, 64)
    errors = [
        float(
            (
                kv_format.rotate(queries) @ kv_format.dequantize(kv_format.quantize(kv_format.rotate(keys))).T
                - expected
            ).norm()
        )
        for kv_format in (rows, plain)
    ]
    assert errors[0] < 0.6 * errors[1]


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="int8, fp8, int4"):
        KVQuantFormat("int3", 64)
