"""HQQ: the method card's figures, fractional zero points, and groups far from zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.quantization.hqq import Hqq
from smelt.errors import RecipeError
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.numerics import QuantizedTensor
from tests.tiny import BUILDS


def heavy_tails() -> Tensor:
    return 0.02 * torch.distributions.StudentT(5.0).sample((1024, 1024))


def start(weight: Tensor, bits: int) -> QuantizedTensor:
    """Return the starting point, before optimization."""
    return Hqq(bits=bits, iterations=0).quantize_matrix(weight)


@pytest.mark.parametrize(("bits", "before", "after"), [(4, 2.379e-3, 2.287e-3), (2, 1.186e-2, 1.098e-2)])
def test_the_mean_error_falls_as_the_card_says(bits: int, before: float, after: float) -> None:
    """The card's seed is unknown; with heavy tails another sample differs by a percent or two."""
    weight = heavy_tails()
    results = [
        float((q.dequantize() - weight).abs().mean())
        for q in (start(weight, bits), Hqq(bits=bits).quantize_matrix(weight))
    ]
    assert results == pytest.approx([before, after], rel=0.03)
    assert results[1] / results[0] == pytest.approx(after / before, rel=0.01)


def test_the_squared_error_falls_as_the_card_says() -> None:
    weight = heavy_tails()
    squares = [
        float((result.dequantize() - weight).square().mean())
        for result in (start(weight, 2), Hqq(bits=2).quantize_matrix(weight))
    ]
    assert squares == pytest.approx([2.11e-4, 1.76e-4], rel=0.04)


def test_zero_points_are_fractional_and_the_scale_is_unchanged() -> None:
    weight = heavy_tails()[:16]
    result = Hqq().quantize_matrix(weight)
    assert result.qparams.zero is not None
    assert float((result.qparams.zero - result.qparams.zero.round()).abs().mean()) > 0.1
    assert torch.equal(result.qparams.scale, start(weight, 4).qparams.scale)


@pytest.mark.parametrize(("middle", "spread"), [(0.0, 0.0), (0.7, 0.0), (-3.0, 1e-6), (100.0, 1e-3), (-4e4, 1.0)])
def test_groups_far_from_zero_and_constant_groups(middle: float, spread: float) -> None:
    """A zero point far outside the code range must fit in float16."""
    weight = middle + spread * torch.randn(4, 64)
    result = Hqq().quantize_matrix(weight).dequantize()
    assert torch.allclose(result, weight, rtol=2e-3, atol=1e-6)


def test_the_method_needs_no_data() -> None:
    model, full = Model(BUILDS["llama"]()), BUILDS["llama"]()
    facts = METHODS.build({"method": "hqq", "group_size": 16}).apply(model, MethodContext())
    assert facts["layers_quantized"] == len(quantized_layers(model.network)) == 21
    for path, layer in quantized_layers(model.network).items():
        assert torch.equal(
            layer.weight, Hqq(group_size=16).quantize_matrix(full.get_submodule(path).weight).dequantize()
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"symmetric": True}, "asymmetric"),
        ({"format": "nf4"}, "asymmetric"),
        ({"lp_norm": 2.0}, "between"),
        ({"beta": 0.0}, "between"),
        ({"bits": 1}, "2 to 8 bits"),
    ],
)
def test_invalid_settings_raise_one_sentence(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        METHODS.build({"method": "hqq", **settings})
    assert "\n" not in str(caught.value)
