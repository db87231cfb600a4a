"""AQAS: joint error never above AWQ, SmoothQuant or no scale; the method card's layer; reported facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.quantization.aqas import Aqas
from smelt.compression.quantization.awq import Awq
from smelt.compression.quantization.layers import LayerGroup
from smelt.compression.quantization.scaling import ScaleSource
from smelt.compression.quantization.search_eval import InputTransform, OutputError
from smelt.compression.quantization.smoothquant import smoothing_scale
from smelt.errors import RecipeError
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from tests.compression.quantization.test_gptq import layer_group
from tests.tiny import BUILDS, inputs


class SingleLayerError(OutputError):
    """Return a layer outside any network."""

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        self.x, self.reference = x, [x @ weight.T]

    def outputs(self, weights: Sequence[Tensor], change: InputTransform | None = None) -> Iterator[Tensor]:
        yield F.linear(self.x if change is None else change(self.x), weights[0])


class AnyScaleSource(ScaleSource):
    """Accepts every scale."""

    name = "anything"

    def divide(self, scale: Tensor) -> None: ...


def output_snr_db(x: Tensor, weight: Tensor) -> dict[str, float]:
    """Return the output SNR of 4-bit weights and 8-bit inputs under each method's scales."""
    group, output_error = layer_group(weight), SingleLayerError(x, weight)
    mean, amax = x.abs().mean(0), x.abs().amax(0)
    joint = Aqas(denormal=False)

    def best(method: Aqas | Awq) -> Tensor:
        return method.best(group, AnyScaleSource(), output_error, mean, amax).candidate.scale

    scales = {
        "none": torch.ones(x.shape[1]),
        "smooth": smoothing_scale(group, amax, 0.5),
        "awq": best(Awq(group_size=-1)),
        "aqas": best(joint),
    }
    power = float(output_error.reference[0].square().mean())
    errors = {name: joint.trial_error(group, output_error, scale) for name, scale in scales.items()}
    return {name: float(10 * torch.log10(torch.tensor(power / error))) for name, error in errors.items()}


def opt_like() -> tuple[Tensor, Tensor]:
    x = torch.randn(1024, 512)
    x[:, torch.randperm(512)[:6]] *= 60
    return x, 0.02 * torch.randn(256, 512)


def llama_like() -> tuple[Tensor, Tensor]:
    """Return weights with heavy tails and columns of different magnitude."""
    weight = 0.02 * torch.distributions.StudentT(5.0).sample((256, 512)) * torch.exp(0.5 * torch.randn(512))
    return torch.randn(1024, 512) * torch.exp(0.3 * torch.randn(512)), weight


def test_outlier_channels_match_the_card() -> None:
    result = output_snr_db(*opt_like())
    assert result == pytest.approx({"none": 18.2, "smooth": 21.9, "awq": 24.1, "aqas": 24.2}, abs=0.5)


@pytest.mark.parametrize("build_layer", [opt_like, llama_like])
def test_it_is_never_worse(build_layer: Any) -> None:
    result = output_snr_db(*build_layer())
    assert result["aqas"] >= max(result.values()) - 1e-6


def test_it_wins_where_neither_family_alone_does_well() -> None:
    """Weight columns are uneven, which AWQ ignores, and the best exponent is not SmoothQuant's."""
    result = output_snr_db(*llama_like())
    assert result["aqas"] > max(result["none"], result["smooth"], result["awq"]) + 0.3


def test_inputs_are_quantized_after_scaling() -> None:
    x, weight = opt_like()
    group, output_error = layer_group(weight), SingleLayerError(x, weight)
    scale = torch.rand(512) + 0.5
    method = Aqas()
    product = method.input_format.fake_quantize(x / scale) @ method.weight_format.fake_quantize(weight * scale).T  # type: ignore[union-attr]
    expected = float((product - x @ weight.T).square().mean())
    assert method.trial_error(group, output_error, scale) == pytest.approx(expected, rel=1e-4)


def test_both_families_are_searched_and_normalized() -> None:
    x, weight = opt_like()
    group: LayerGroup = layer_group(weight)
    result = list(Aqas().candidates(group, x.abs().mean(0), x.abs().amax(0)))
    assert [(c.family, round(20 * c.exponent)) for c in result] == [
        (f, a) for f in ("mean", "smooth") for a in range(20)
    ]
    assert torch.allclose(result[0].scale, torch.ones(512))
    assert all(float(c.scale.max() * c.scale.min()) == pytest.approx(1, rel=1e-4) for c in result)
    smooth = smoothing_scale(group, x.abs().amax(0), 0.5)
    assert torch.allclose(result[30].scale / result[30].scale[0], smooth / smooth[0])


def run(settings: dict[str, Any]) -> tuple[Model, dict[str, Any]]:
    model = Model(BUILDS["llama"]())
    facts = METHODS.build({"method": "aqas", "search_tokens": 30, **settings}).apply(
        model, MethodContext(batches=[inputs("llama")])
    )
    return model, facts


def test_reported_facts() -> None:
    model, facts = run({})
    assert facts["calibration_length"] == 11
    assert len(facts["layers"]) == 21
    for path, fact in facts["layers"].items():
        layer = quantized_layers(model.network)[path]
        assert fact["scheme"] == {"weight": "dint4@float16", "inputs": "int8", "static": False}
        assert fact["error_share"]["underflow"] + fact["error_share"]["rounding"] == pytest.approx(1)
        assert fact["vanished"] == pytest.approx(float((layer.weight == 0).float().mean()), abs=1e-6)
        assert fact["scaling"]["error"] <= fact["scaling"]["error_unscaled"]


def test_fewer_weights_round_to_zero_in_dint() -> None:
    shares = []
    for denormal in (False, True):
        _, facts = run({"denormal": denormal, "rounding": "rtn"})
        shares.append(sum(fact["error_share"]["underflow"] for fact in facts["layers"].values()))
    assert shares[1] < 0.7 * shares[0]


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        ({"bits": 3}, "dint3@float16"),
        ({"group_size": 16, "symmetric": True}, "dint4-sym/16@float16"),
        ({"format": "int4/16"}, "int4/16"),
    ],
)
def test_the_format_follows_the_settings(settings: dict[str, Any], scheme: str) -> None:
    _, facts = run(settings)
    assert {fact["scheme"]["weight"] for fact in facts["layers"].values()} == {scheme}


@pytest.mark.parametrize(
    "settings",
    [{"rounding": "magic"}, {"search_tokens": 0}, {"bits": 2}, {"static_activations": True, "input_activations": None}],
)
def test_invalid_settings_raise_one_sentence(settings: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        METHODS.build({"method": "aqas", **settings})
    assert "\n" not in str(caught.value)
