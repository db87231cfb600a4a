"""Round to nearest: errors within half a step, the method card's figures, and a range search never worse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.quantization.rounding import ERROR_POWER, round_to_nearest, search_qparams
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.numerics import FORMATS, get_format
from smelt.numerics.error import signal_to_noise
from smelt.numerics.integer import Integer
from tests.tiny import BUILDS


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8), symmetric=st.booleans(), group=st.sampled_from([-1, 0, 8, 16, 5]),
    size=st.floats(1e-3, 1e3), shift=st.floats(-2, 2), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_no_error_exceeds_half_a_step(
    bits: int, symmetric: bool, group: int, size: float, shift: float, seed: int
) -> None:
    weight = size * (torch.randn(6, 32, generator=torch.Generator().manual_seed(seed)) + shift)
    number_format = Integer(group, "float32", bits, symmetric)
    result = round_to_nearest(weight, number_format)
    steps = result.qparams.scale.expand(-1, -1, number_format.effective_group_size(32)).flatten(-2)[..., :32]
    assert bool(((result.dequantize() - weight).abs() <= steps * 0.5001).all())


@pytest.mark.parametrize(("group", "decibel"), [(32, 21.85), (128, 19.95), (4096, 17.09)])
def test_the_figures_of_the_card(group: int, decibel: float) -> None:
    weight = torch.randn(256, 4096)
    result = round_to_nearest(weight, Integer(group, "float32", 4, symmetric=False))
    assert signal_to_noise(weight, result.dequantize()) == pytest.approx(decibel, abs=0.05)


@pytest.mark.parametrize("name", [*FORMATS, "int4/tensor", "int4-asym/tensor", "int3-asym/7"])
def test_the_range_search_is_never_worse(name: str) -> None:
    number_format = get_format(name)
    weight = torch.distributions.StudentT(4.0).sample((12, 96))
    grouped = number_format.split_groups(weight)

    def errors(values: torch.Tensor) -> torch.Tensor:
        powers = number_format.split_groups(values - weight).abs().pow(ERROR_POWER).sum(-1)
        return powers.sum() if "tensor" in name else powers

    plain, searched = round_to_nearest(weight, number_format), round_to_nearest(weight, number_format, search=True)
    assert bool((errors(searched.dequantize()) <= errors(plain.dequantize())).all())
    grid = search_qparams(grouped, number_format, number_format.tensor_amax(weight))
    assert all(torch.equal(tensor, searched.qparams.tensors()[key]) for key, tensor in grid.tensors().items())


def test_the_range_search_narrows_groups_with_an_outlier() -> None:
    weight = torch.randn(4, 128)
    weight[:, 0] = 6.0
    number_format = Integer(-1, "float32", 2, symmetric=True)
    plain, searched = round_to_nearest(weight, number_format), round_to_nearest(weight, number_format, search=True)
    assert bool((searched.qparams.scale < 0.8 * plain.qparams.scale).all())
    assert signal_to_noise(weight, searched.dequantize()) > signal_to_noise(weight, plain.dequantize()) + 1


@pytest.mark.parametrize("search", [False, True])
def test_the_method_rounds_every_layer_independently(search: bool) -> None:
    model, full = Model(BUILDS["gpt2"]()), BUILDS["gpt2"]()
    METHODS.build({"method": "rtn", "group_size": 16, "range_search": search}).apply(model, MethodContext())
    layers = quantized_layers(model.network)
    assert len(layers) == 3 * 4
    for path, layer in layers.items():
        weight = full.get_submodule(path).weight.T
        expected = round_to_nearest(weight, Integer(16, "float16", 4, symmetric=False), search).dequantize()
        assert torch.equal(layer.weight, expected)
