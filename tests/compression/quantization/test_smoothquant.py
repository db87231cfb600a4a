"""SmoothQuant: the method card's figures on one outlier channel, only norm-fed layers, and the closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.block_inputs import capture_block_inputs
from smelt.compression.quantization.base import BlockWork
from smelt.compression.quantization.layers import layer_groups
from smelt.compression.quantization.smoothquant import SmoothQuant, smoothing_scale
from smelt.errors import RecipeError
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.numerics import FORMATS
from smelt.numerics.error import signal_to_noise
from tests.compression.quantization.test_gptq import layer_group
from tests.tiny import BUILDS, inputs

INT8 = FORMATS["int8"]


def batches(name: str) -> list[dict[str, Tensor]]:
    return [inputs(name, seed=seed) for seed in range(3)]


def apply_smoothquant(name: str, **settings: Any) -> tuple[Model, dict[str, Any]]:
    model = Model(BUILDS[name]())
    facts = METHODS.build({"method": "smoothquant", **settings}).apply(model, MethodContext(batches=batches(name)))
    return model, facts


def test_one_outlier_channel_matches_the_card() -> None:
    x, weight = torch.randn(2048, 512), 0.02 * torch.randn(512, 512)
    x[:, 100] *= 100
    true, quiet = x @ weight.T, torch.arange(512) != 100

    def output(scale: Tensor) -> float:
        return signal_to_noise(true, INT8.fake_quantize(x / scale) @ INT8.fake_quantize(weight * scale).T)

    def ordinary(scale: Tensor) -> float:
        return signal_to_noise(x[:, quiet], (INT8.fake_quantize(x / scale) * scale)[:, quiet])

    none, smooth = torch.ones(512), smoothing_scale(layer_group(weight), x.abs().amax(0), 0.5)
    assert (output(none), output(smooth)) == pytest.approx((26.0, 43.1), abs=0.5)
    assert (ordinary(none), ordinary(smooth)) == pytest.approx((12.5, 33.0), abs=0.7)


def test_the_closed_form_uses_all_layers_that_share_the_input() -> None:
    group = layer_group(torch.tensor([[1.0, -4.0]]), torch.tensor([[-9.0, 2.0], [0.5, 0.0]]))
    result = smoothing_scale(group, torch.tensor([16.0, 25.0]), 0.25)
    assert torch.allclose(result, torch.tensor([16.0**0.25 / 9.0**0.75, 25.0**0.25 / 4.0**0.75]))


def test_zero_channels_and_zero_columns_keep_a_positive_scale() -> None:
    result = smoothing_scale(layer_group(torch.tensor([[0.0, 1.0, 0.0]])), torch.tensor([3.0, 0.0, 0.0]), 0.5)
    assert bool((result > 0).all()) and bool(result.isfinite().all())


@torch.no_grad()
def test_smoothing_alone_changes_nothing() -> None:
    for name in ("llama", "opt", "gpt2", "vit"):
        network = BUILDS[name]()
        before = network(**inputs(name)).logits
        anatomy = anatomy_of(network)
        block_inputs = capture_block_inputs(anatomy, batches(name))
        method = SmoothQuant()
        block = anatomy.blocks[0]
        schemes = {layer.path: method.scheme for group in layer_groups(block) for layer in group.layers}
        work = BlockWork(block, block_inputs, MethodContext(), network, schemes, {})
        old = {key: tensor.clone() for key, tensor in network.state_dict().items()}
        notes = method.smooth(work)
        changed = {key for key, tensor in network.state_dict().items() if not torch.equal(tensor, old[key])}
        assert {path.rpartition(".")[0] for path in changed} >= set(notes)
        assert torch.allclose(network(**inputs(name)).logits, before, atol=1e-5)


def test_only_what_a_norm_feeds_is_smoothed() -> None:
    model, facts = apply_smoothquant("llama")
    into = {path.rpartition(".")[2]: fact["scaling"]["into"] for path, fact in facts["layers"].items()}
    norm_fed = ("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj")
    assert into == {**dict.fromkeys(norm_fed, "norm"), "o_proj": None, "down_proj": None}
    full = BUILDS["llama"]()
    for path, layer in quantized_layers(model.network).items():
        plain = torch.allclose(layer.weight, full.get_submodule(path).weight, atol=2e-3)
        assert plain == (into[path.rpartition(".")[2]] is None)


def test_a_post_norm_network_is_not_smoothed_and_reports_it() -> None:
    _, facts = apply_smoothquant("bert")
    assert {fact["scaling"]["into"] for fact in facts["layers"].values()} == {None}


def test_the_defaults_are_w8a8() -> None:
    _, facts = apply_smoothquant("opt")
    schemes = [fact["scheme"] for fact in facts["layers"].values()]
    assert all(scheme == {"weight": "int8@float16", "inputs": "int8", "static": False} for scheme in schemes)


@pytest.mark.parametrize("rounding", ["rtn", "gptq"])
@pytest.mark.parametrize("static", [False, True])
def test_it_helps_with_an_outlier_channel(rounding: str, static: bool) -> None:
    """An outlier channel in the norm, scaled down in the weights to keep outputs moderate."""

    def loud() -> Model:
        model = Model(BUILDS["llama"]())
        with torch.no_grad():
            for block in model.network.model.layers:
                block.input_layernorm.weight[5] *= 60
                block.post_attention_layernorm.weight[5] *= 60
                for layer in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
                    layer.weight[:, 5] /= 60
                for layer in (block.mlp.up_proj, block.mlp.gate_proj):
                    layer.weight[:, 5] /= 60
        return model

    def error(settings: dict[str, Any]) -> float:
        model = loud()
        METHODS.build({"input_activations": "int8", "static_activations": static, **settings}).apply(
            model, MethodContext(batches=batches("llama"))
        )
        with torch.no_grad():
            true = loud().network(**inputs("llama")).logits
            return float((model.network(**inputs("llama")).logits - true).square().mean())

    plain = error({"method": "rtn", "bits": 8, "group_size": -1, "symmetric": True})
    assert error({"method": "smoothquant", "rounding": rounding}) < plain / 10


@pytest.mark.parametrize(
    "settings", [{"alpha": 1.5}, {"alpha": -0.1}, {"rounding": "magic"}, {"input_activations": "int4711"}]
)
def test_invalid_settings_raise_one_sentence(settings: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        METHODS.build({"method": "smoothquant", **settings})
    assert "\n" not in str(caught.value)
