"""Slicing packed layers: kept rows and columns dequantize unchanged, bit for bit; groups are not split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from smelt.compression.base import MethodContext
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.errors import ModelError
from smelt.measure.cost import Workload, block_cost, unit_costs
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.models.surgery import keep_units
from smelt.numerics.catalog import FORMATS, get_format
from tests.tiny import BUILDS, inputs

OTHERS = ["int3-asym/32@float16", "int5/16", "mxfp6-e2m3/8", "int4/tensor", "nvfp4/32", "int8/256"]
NAMES = sorted({*FORMATS, *OTHERS})


def layer(name: str, columns: int = 128, rows: int = 24) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-1, 1, columns)
    form = get_format(name)
    packed_layer = QuantizedLinear.from_quantized(
        form.quantize(weight),
        QuantizationScheme(form),
        bias=torch.randn(rows, generator=generator),
        dtype=torch.float32,
    )
    packed_layer.add_low_rank_factors(
        torch.randn(3, columns, generator=generator), torch.randn(rows, 3, generator=generator)
    )
    return packed_layer


def full_weight(packed: QuantizedLinear) -> Tensor:
    """Return the dequantized matrix including the low-rank factors."""
    return packed.weight + packed.up @ packed.down


@pytest.mark.parametrize("name", NAMES)
def test_rows_can_be_sliced_freely(name: str) -> None:
    packed, rows = layer(name), torch.tensor([5, 3, 20, 21])
    weight, matrix, bias = packed.weight, full_weight(packed), packed.bias
    assert bias is not None and packed.bias is not None
    packed.keep_rows(rows)
    assert torch.equal(packed.weight, weight[rows]) and torch.equal(packed.bias, bias[rows])
    assert torch.allclose(full_weight(packed), matrix[rows]) and packed.out_features == 4
    x = torch.randn(2, 128)
    assert torch.allclose(packed(x), x @ matrix[rows].T + bias[rows], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_columns_are_sliced_by_group(name: str) -> None:
    """In any order of the groups; with per-row scales, any columns."""
    packed, size = layer(name), get_format(name).effective_group_size(128)
    columns = torch.tensor([100, 7, 1]) if size == 128 else torch.cat((torch.arange(64, 128), torch.arange(size)))
    weight, down, x = packed.weight, packed.down, torch.randn(2, len(columns))
    packed.keep_columns(columns)
    assert torch.equal(packed.weight, weight[:, columns]) and torch.equal(packed.down, down[:, columns])
    assert packed.in_features == len(columns)
    assert torch.allclose(packed(x), x @ full_weight(packed).T + packed.bias, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["int4/32", "mxfp4", "int3/32"])
def test_a_partial_last_group_stays_last(name: str) -> None:
    packed = layer(name, columns=80)
    weight = packed.weight
    packed.keep_columns(torch.arange(32, 80))
    assert torch.equal(packed.weight, weight[:, 32:])
    with pytest.raises(ModelError, match="32 inputs of a layer share a scale"):
        layer(name, columns=80).keep_columns(torch.cat((torch.arange(64, 80), torch.arange(32))))


def test_groups_are_not_mixed() -> None:
    for columns in (torch.arange(16, 80), torch.arange(0, 128, 2)):
        with pytest.raises(ModelError, match="32 inputs of a layer share a scale: keep or remove them together"):
            layer("int4/32").keep_columns(columns)
    part = layer("int4/32")
    part.keep_columns(torch.arange(40, 60))  # a slice of one group keeps the scale of that group
    assert torch.equal(part.weight, layer("int4/32").weight[:, 40:60])
    rotated = layer("int4")
    rotated.scheme = replace(rotated.scheme, hadamard=True)
    with pytest.raises(ModelError, match="cannot be removed individually"):
        rotated.keep_columns(torch.arange(64))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_surgery_on_packed_layers_matches_surgery_on_dequantized_ones(name: str) -> None:
    """Remove heads and channels; unit costs, low-rank factors included, equal what is freed."""
    model = Model(BUILDS[name]())
    RoundToNearest(bits=8, group_size=-1).apply(model, MethodContext())
    plain = BUILDS[name]()
    modules = dict(plain.named_modules())
    with torch.no_grad():
        for path, packed in quantized_layers(model.network).items():
            packed.add_low_rank_factors(torch.randn(2, packed.in_features) / 8, torch.randn(packed.out_features, 2) / 8)
            module, matrix = modules[path], full_weight(packed)
            module.weight.copy_(matrix.T if module.weight.shape != matrix.shape or name == "gpt2" else matrix)
    work = Workload(tokens=16)
    for position in range(4):
        for measure in ("parameters", "macs"):
            anatomy = anatomy_of(model.network)
            part, price = anatomy.parts[position], unit_costs(anatomy, measure, work)[position]
            before = block_cost(anatomy, measure, work)
            keep_units(model.network, part, range(1, part.units))
            keep_units(plain, anatomy_of(plain).parts[position], range(1, part.units))
            assert before - block_cost(anatomy_of(model.network), measure, work) == price
            if part.units == 2:
                break
    with torch.no_grad():
        logits, expected = (network(**inputs(name)).logits for network in (model.network, plain))
    assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-3)
