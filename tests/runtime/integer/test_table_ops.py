"""Softmax and norms by tables against float64 formulas, at scales from 1e-6 to 1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from smelt.errors import ConversionError
from smelt.numerics.nn_lut import default_table
from smelt.runtime.integer import ops
from smelt.runtime.integer.table_constants import norm_table_constants, softmax_table_constants, table_constants
from smelt.runtime.integer.table_ops import floor_log2

SCALES = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]


def test_floor_log2_is_exact() -> None:
    values = [1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62 - 1, 2**62]
    assert floor_log2(torch.tensor(values)).tolist() == [value.bit_length() - 1 for value in values]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("length", [1, 5, 128, 512])
def test_softmax_by_tables(scale: float, length: int) -> None:
    """Within 1 % of float64, apart from half a step of the output; rows sum to one within rounding."""
    generator = torch.Generator().manual_seed(length)
    x = (torch.randn(40, length, generator=generator) * 2 / scale).round().to(torch.int32)
    attributes, constants, output_scale = softmax_table_constants(scale, length, "layer", levels=2**11)
    result = ops.softmax_table(x, **attributes, **constants).double() * output_scale
    expected = (x.double() * scale).softmax(-1)
    assert float((result - expected).abs().max()) < 0.01 + 0.5 / 2**11
    assert float((result.sum(-1) - 1).abs().max()) < 0.01 + length * 0.5 / 2**11
    assert int(ops.softmax_table(x, **attributes, **constants).max()) <= 2**11


def test_probabilities_by_tables_are_rounded_half_up() -> None:
    """Their errors have no bias: rounding down, or at another fraction, would shift all of them."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(200, 64, generator=generator) / 0.01).round().to(torch.int32)
    attributes, constants, scale = softmax_table_constants(0.01, 64, "layer")
    levels = ops.softmax_table(x, **attributes, **constants).double()
    expected = (x.double() * 0.01).softmax(-1) / scale
    assert abs(float((levels - expected).mean())) < 0.05


def test_masked_positions_have_no_probability() -> None:
    x = torch.tensor([[100, 900, -50], [5, 6, 7]], dtype=torch.int32)
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    attributes, constants, scale = softmax_table_constants(0.01, 3, "layer")
    result = ops.softmax_table(x, mask, **attributes, **constants)
    assert result[:, 1].tolist() == [0, 0]
    assert result[1].tolist() == [0, 0, 0]
    assert torch.allclose(result[0].double() * scale, torch.tensor([0.8176, 0, 0.1824], dtype=torch.float64), atol=0.01)


@pytest.mark.parametrize("scale", SCALES)
def test_layer_norm_by_a_table(scale: float) -> None:
    """With an outlier channel; 1/sqrt(x) of 16 entries is off by 0.2 % at most."""
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(30, 768, generator=generator).double()
    real[:, 7] *= 40
    x = (real / scale).round().long()
    weight, bias = torch.randn(768, generator=generator), torch.randn(768, generator=generator)
    limit = int(x.abs().max())
    attributes, constants, output_scale = norm_table_constants(scale, limit, weight, bias, 1e-12, "layer")
    result = ops.layer_norm_table(x, **attributes, **constants).double() * output_scale
    expected = F.layer_norm(x.double() * scale, (768,), weight.double(), bias.double(), 1e-12)
    assert float((result - expected).square().mean().sqrt()) < (3e-3 if scale < 0.1 else 0.05)
    assert int(ops.layer_norm_table(x, **attributes, **constants).abs().max()) < 2**31
    attributes, constants, output_scale = norm_table_constants(scale, limit, weight, None, 1e-12, "layer")
    result = ops.rms_norm_table(x, **attributes, **constants).double() * output_scale
    expected = F.rms_norm(x.double() * scale, (768,), weight.double(), 1e-12)
    assert float((result - expected).square().mean().sqrt()) < 2e-3


def test_norm_of_zeros_is_its_bias() -> None:
    weight, bias = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.5, -1.0, 0.0])
    attributes, constants, scale = norm_table_constants(0.01, 127, weight, bias, 0.0, "layer")
    result = ops.layer_norm_table(torch.zeros(1, 3, dtype=torch.int32), **attributes, **constants)
    assert torch.allclose(result[0].double() * scale, bias.double(), atol=1e-3)


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh"])
def test_table_node_stays_in_int32(name: str) -> None:
    table = default_table(name)
    constants, output_scale = table_constants(table, 8 / 32767, "layer")
    q = torch.arange(-32767, 32768)
    result = ops.table(q, **constants)
    assert int(result.abs().max()) < 2**31
    assert float((result.double() * output_scale - table(q.double() * 8 / 32767)).abs().max()) < 2e-4


def test_refusals_name_the_layer() -> None:
    with pytest.raises(ConversionError, match=r"encoder\.0.*shorten"):
        softmax_table_constants(0.01, 2**23, "encoder.0")
    for scale in (1e-9, 17.0):
        with pytest.raises(ConversionError, match=r"encoder\.0.*1.5e-8"):
            softmax_table_constants(scale, 8, "encoder.0")
    with pytest.raises(ConversionError, match=r"encoder\.0.*16 bits"):
        table_constants(default_table("gelu"), 0.01, "encoder.0", limit=2**31)
