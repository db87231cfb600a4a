"""Quantized KV cache rows: a row reads back as written, within the precision of the format."""

from __future__ import annotations

import pytest
import torch

from smelt.kernels.kv_quant import CLIP, INT3, INT4, INT8, KV_QUANT_DTYPES, KVQuantFormat, quantize_qkv
from smelt.numerics.catalog import get_format
from smelt.numerics.format import Format

CATALOGUE = {
    "int8": "int8",
    "fp8": "fp8-e4m3",
    "int4": "int4-asym/row@float16",
    "int3": "int3-asym/row@float16",
}  # the same formats in the reference implementation


def reference(name: str, x: torch.Tensor) -> torch.Tensor:
    number: Format = get_format(CATALOGUE[name])
    groups = number.split_groups(x)
    qparams = number.compute_qparams(groups, clip_ratio=CLIP.get(name, 1.0))
    return number.dequantize_groups(number.quantize_groups(groups, qparams), qparams).flatten(-2)


@pytest.mark.parametrize("name", KV_QUANT_DTYPES)
@pytest.mark.parametrize("width", [16, 24, 64, 96, 128])
def test_rows_match_the_catalog_format(name: str, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, width) * torch.logspace(-3, 3, 50)[:, None, None]
    rows = KVQuantFormat(name, width)
    packed = rows.quantize(x)
    assert packed.shape == (50, 3, rows.row_bytes) and packed.dtype == torch.uint8
    code_bytes = {"int4": (1 << (width - 1).bit_length()) // 2, "int3": -(-width // 32) * 12}.get(name, width)
    assert rows.row_bytes == code_bytes + 4
    actual = rows.dequantize(packed)
    step = actual.abs().amax(-1, keepdim=True) / 100
    expected = reference(name, x.flatten(0, 1)).view_as(x)
    assert float(((actual - expected).abs() > 2 * step).float().mean()) < 0.002  # except ties
    assert float((actual - x).norm() / x.norm()) < {"int8": 0.01, "fp8": 0.04, "int4": 0.12, "int3": 0.25}[name]


@pytest.mark.parametrize("name", KV_QUANT_DTYPES)
def test_rows_of_zeros_and_of_one_sign(name: str) -> None:
    rows = KVQuantFormat(name, 32)
    assert not bool(rows.dequantize(rows.quantize(torch.zeros(2, 32))).any())
    positive = 5 + torch.rand(4, 32)
    largest = {INT8: 0.03, INT4: 0.38, INT3: 0.8}.get(name, 0.25)
    assert float((rows.dequantize(rows.quantize(positive)) - positive).abs().max()) < largest


def test_int3_codes_are_in_words_of_pairs() -> None:
    """Counting by hand: scale 1 and zero point 4, codes i % 8 of 40 values, eight in the second group."""
    codes = torch.arange(40) % 8
    rows = KVQuantFormat(INT3, 40)
    packed = rows.quantize((codes - 4).float() * 8 / 7)[None].view(torch.int32)[0]  # a range of 8: the scale is 1
    assert rows.row_bytes == 4 * len(packed) == 28
    for value, code in enumerate(codes.tolist()):
        group, slot, half = value // 32, value % 32 // 2, value % 2
        words = [int(word) >> 16 * half for word in packed[3 * group : 3 * group + 3]]
        bits = words[slot // 5] >> 3 * (slot % 5) & 7 if slot < 15 else sum((words[i] >> 15 & 1) << i for i in range(3))
        assert bits == code
    assert int(packed[-1]) >> 16 == 4 and rows.dequantize(packed.view(torch.uint8)).tolist() == (codes - 4).tolist()


@pytest.mark.parametrize("name", [INT4, INT3])
def test_the_hadamard_transform_keeps_products_and_spreads_outliers(name: str) -> None:
    torch.manual_seed(1)
    rows = KVQuantFormat.for_head_dim(name, 64)
    assert (
        rows.hadamard
        and not KVQuantFormat.for_head_dim(name, 96).hadamard
        and not KVQuantFormat.for_head_dim(INT8, 64).hadamard
    )
    queries, keys = torch.randn(20, 64), torch.randn(30, 64)
    keys[:, 3] += 25  # an outlier channel
    expected = queries @ keys.T
    assert torch.allclose(rows.rotate(queries) @ rows.rotate(keys).T, expected, atol=1e-3)
    assert torch.allclose(rows.unrotate(rows.rotate(keys)), keys, atol=1e-4)
    plain = KVQuantFormat(name, 64)
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
    with pytest.raises(ValueError, match="int8, fp8, int4, int3"):
        KVQuantFormat("int2", 64)


@pytest.mark.parametrize("name", KV_QUANT_DTYPES)
def test_rows_of_keys_and_values_read_back_unrotated(name: str) -> None:
    torch.manual_seed(2)
    rows = KVQuantFormat.for_head_dim(name, 64)
    keys, values = torch.randn(2, 30, 64)
    values[:, 7] *= 20  # an outlier channel
    _, key_rows, value_rows = quantize_qkv(rows, keys, keys, values)
    for x, packed in ((keys, key_rows), (values, value_rows)):
        error = float((rows.dequantize_unrotated(packed, torch.float32) - x).norm() / x.norm())
        assert error < {"int8": 0.02, "fp8": 0.04, "int4": 0.12, "int3": 0.25}[name]
