"""Rows of keys and values in few bits: what is read is what was written, to the precision of the format."""

from __future__ import annotations

import pytest
import torch

from smelt.kernels.kv_quant import INT4, INT8, NAMES, RowFormat
from smelt.numerics.catalogue import format_named
from smelt.numerics.format import Format

CATALOGUE = {"int8": "int8", "fp8": "fp8-e4m3", "int4": "int4-asym/row@float16"}  # the same formats, by their reference


def reference(name: str, x: torch.Tensor) -> torch.Tensor:
    number: Format = format_named(CATALOGUE[name])
    return number.quantize(x).values()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [16, 24, 64, 96, 128])
def test_rows_hold_what_the_catalogues_format_holds(name: str, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, width) * torch.logspace(-3, 3, 50)[:, None, None]
    rows = RowFormat(name, width)
    packed = rows.encode(x)
    assert packed.shape == (50, 3, rows.bytes) and packed.dtype == torch.uint8
    assert rows.bytes == {"int8": width + 4, "fp8": width + 4, "int4": (1 << (width - 1).bit_length()) // 2 + 4}[name]
    found = rows.decode(packed)
    step = found.abs().amax(-1, keepdim=True) / 100
    wanted = reference(name, x.flatten(0, 1)).view_as(x)
    assert float(((found - wanted).abs() > 2 * step).float().mean()) < 0.002  # ties apart
    assert float((found - x).norm() / x.norm()) < {"int8": 0.01, "fp8": 0.04, "int4": 0.12}[name]


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_nothing_and_of_one_sign(name: str) -> None:
    rows = RowFormat(name, 32)
    assert not bool(rows.decode(rows.encode(torch.zeros(2, 32))).any())
    positive = 5 + torch.rand(4, 32)
    assert float((rows.decode(rows.encode(positive)) - positive).abs().max()) < {INT8: 0.03, INT4: 0.21}.get(name, 0.25)


def test_turning_leaves_products_and_spreads_what_stands_out() -> None:
    torch.manual_seed(1)
    rows = RowFormat.of(INT4, 64)
    assert rows.turns and not RowFormat.of(INT4, 96).turns and not RowFormat.of(INT8, 64).turns
    queries, keys = torch.randn(20, 64), torch.randn(30, 64)
    keys[:, 3] += 25  # a channel that is large in every key
    wanted = queries @ keys.T
    assert torch.allclose(rows.turned(queries) @ rows.turned(keys).T, wanted, atol=1e-3)
    assert torch.allclose(rows.back(rows.turned(keys)), keys, atol=1e-4)
    plain = RowFormat(INT4, 64)
    errors = [
        float((each.turned(queries) @ each.decode(each.encode(each.turned(keys))).T - wanted).norm())
        for each in (rows, plain)
    ]
    assert errors[0] < 0.6 * errors[1]


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="int8, fp8, int4"):
        RowFormat("int3", 64)
