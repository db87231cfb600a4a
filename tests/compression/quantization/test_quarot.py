"""QuaRot: online rotations are exact, clipping matches its definition, and outliers no longer hurt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.observers import HessianObserver
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization.layers import layer_groups
from smelt.compression.quantization.rotated import rotate_inputs
from smelt.errors import DataError, ModelError, RecipeError
from smelt.kernels.hadamard import hadamard_transform
from smelt.kernels.linear import ActivationQuant
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import quantized_layers
from smelt.numerics.catalog import FORMATS
from smelt.numerics.error import signal_to_noise
from smelt.numerics.integer import Integer
from tests.tiny import BUILDS, inputs

INT4 = FORMATS["int4"]


def batches(name: str, count: int = 3) -> list[dict[str, Tensor]]:
    return [inputs(name, seed=10 + index) for index in range(count)]


def quarot(model: Model, seed: int = 0, name: str = "llama", **settings: object) -> dict[str, Any]:
    context = MethodContext(seed=seed, batches=batches(name))
    return METHODS.build({"method": "quarot", **settings}).apply(model, context)


@torch.no_grad()
def logits(network: Any, name: str = "llama") -> Tensor:
    logits: Tensor = network(**inputs(name)).logits
    return logits


def with_outliers(seed: int) -> hf.PreTrainedModel:
    """Return a network whose residual stream has three outlier channels, like large models."""
    torch.manual_seed(seed)
    network = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            hidden_size=128, intermediate_size=192, num_attention_heads=4, num_hidden_layers=2, vocab_size=99
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.add_(0.06 * torch.randn_like(parameter))
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                parameter[:, [3, 40, 77]] *= 30
    return network


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3", "gpt2", "opt"])
@pytest.mark.parametrize("rounding", ["gptq", "rtn"])
def test_eight_bits_barely_change_the_function(name: str, rounding: str) -> None:
    model = Model(BUILDS[name]())
    before = logits(model.network, name)
    facts = quarot(
        model, name=name, bits=8, input_activations="int8", input_clip_ratio=1.0, range_search=False, rounding=rounding
    )
    assert signal_to_noise(before, logits(model.network, name)) > 30
    layers = quantized_layers(model.network)
    assert (
        facts["layers_quantized"]
        == len(layers)
        == sum(len(g.layers) for b in model.anatomy.blocks for g in layer_groups(b))
    )
    rotating = {path for path, layer in layers.items() if layer.scheme.hadamard}
    assert rotating == {part.output.path for part in model.anatomy.parts}
    assert facts["layers_rotating_their_inputs"] == len(rotating) and facts["widths_without_hadamard"] == []
    assert facts["parameters_added"] == (99 * 32 if name in ("llama-tied", "gpt2", "opt") else 0)


def test_a_transform_of_the_inputs_is_undone_in_the_weight() -> None:
    network = BUILDS["gpt2"]()  # its weights are stored transposed
    group = layer_groups(anatomy_of(network).blocks[0])[3]
    assert group.columns == 48 and not group.is_input_group
    x, moment, expected = torch.randn(20, 48), HessianObserver(), HessianObserver()
    product = x @ group.layers[0].weight.T
    moment(x)
    expected(hadamard_transform(x))
    rotate_inputs(group, moment)
    assert torch.allclose(hadamard_transform(x) @ group.layers[0].weight.T, product, atol=1e-5)
    assert moment.matrix is not None and expected.matrix is not None
    assert torch.allclose(moment.matrix, expected.matrix, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rotation_protects_four_bit_inputs_from_outliers(seed: int) -> None:
    quality = {}
    settings = {"group_size": -1, "symmetric": True, "input_activations": "int4", "range_search": True}
    for step in (
        {"method": "rtn", **settings},
        {"method": "quarot", "rounding": "rtn"},
        {"method": "quarot", "rounding": "gptq"},
    ):
        model = Model(with_outliers(seed))
        before = logits(model.network)
        METHODS.build(step).apply(model, MethodContext(seed=seed, batches=batches("llama", 6)))
        quality[step["method"], step.get("rounding")] = signal_to_noise(before, logits(model.network))
    plain, rotated, feedback = quality.values()
    assert rotated > plain + 3, quality
    assert feedback > plain + 3, quality


@pytest.mark.parametrize("name", ["int4", "int4-asym", "int8", "fp4", "mxfp4", "amxfp4", "nvfp4"])
def test_clipped_inputs_use_the_narrower_range(name: str) -> None:
    number_format = FORMATS[name]
    x = torch.randn(6, 64)
    assert torch.equal(ActivationQuant(number_format, clip_ratio=1.0).fake_quantize(x), number_format.fake_quantize(x))
    clipped = ActivationQuant(number_format, clip_ratio=0.5).fake_quantize(x)
    assert clipped.shape == x.shape and not torch.equal(clipped, number_format.fake_quantize(x))
    assert (clipped.abs().amax(-1) < 0.8 * x.abs().amax(-1)).all()  # scales are rounded too, hence not 0.5


def test_clipping_is_per_token() -> None:
    x = torch.tensor([[0.1, 0.2, -1.0, 0.9], [10.0, 1.0, 2.0, -3.0]])
    steps = 0.9 * x.abs().amax(-1, keepdim=True) / 7
    assert torch.allclose(
        ActivationQuant(INT4, clip_ratio=0.9).fake_quantize(x), (x / steps).round().clamp(-8, 7) * steps
    )


def test_a_scheme_with_clipping_and_rotation_is_saved(tmp_path: Path) -> None:
    model = Model(BUILDS["llama-tied"]())
    quarot(model)
    scheme = next(layer.scheme for layer in quantized_layers(model.network).values() if layer.scheme.hadamard)
    assert scheme.to_json() == {
        "weight": "int4@float16", "inputs": "int4", "static": False, "hadamard": True, "clip": 0.9,
    }  # fmt: skip
    assert QuantizationScheme.from_json(scheme.to_json(), "here") == scheme
    assert "clip" not in QuantizationScheme(INT4, INT4).to_json()
    save_artifact(model, tmp_path)
    reloaded = load_artifact(tmp_path)
    assert torch.equal(logits(reloaded.network), logits(model.network))
    assert {p: layer.scheme for p, layer in quantized_layers(reloaded.network).items()} == {
        p: layer.scheme for p, layer in quantized_layers(model.network).items()
    }


@pytest.mark.parametrize("clip", [0.0, -1.0, 1.5, math.nan, "0.9", True])
def test_an_invalid_clip_ratio_in_a_file_is_refused(clip: object) -> None:
    with pytest.raises(ModelError, match="here"):
        QuantizationScheme.from_json({"weight": "int4", "inputs": "int4", "clip": clip}, "here")


def test_a_width_without_a_hadamard_matrix_is_skipped_and_reported() -> None:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=58, num_attention_heads=4, num_hidden_layers=1, vocab_size=99
    )
    model = Model(hf.LlamaForCausalLM(config).eval())
    before = logits(model.network)
    facts = quarot(model, bits=8, input_activations="int8", rounding="rtn")
    assert facts["widths_without_hadamard"] == [58] and facts["layers_rotating_their_inputs"] == 1
    assert signal_to_noise(before, logits(model.network)) > 25


def test_online_rotations_can_be_disabled() -> None:
    model = Model(BUILDS["llama"]())
    facts = quarot(model, rotate_ffn=False, rotate_heads=False, rounding="rtn")
    assert facts["layers_rotating_their_inputs"] == 0
    assert not any(layer.scheme.hadamard for layer in quantized_layers(model.network).values())


def test_weights_only() -> None:
    model = Model(BUILDS["llama"]())
    quarot(model, input_activations=None, rounding="rtn")
    schemes = {layer.scheme.clip for layer in quantized_layers(model.network).values()}
    assert schemes == {1.0}
    assert quantized_layers(model.network)["model.layers.0.mlp.up_proj"].scheme.weight == Integer(-1, "float16", 4)


def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    results = []
    for folder in (tmp_path / "work", tmp_path / "work", None):  # the second run reuses the blocks of the first
        model = Model(BUILDS["llama-tied"]())
        context = MethodContext(seed=3, batches=batches("llama"), checkpoint=Checkpoint(folder))
        METHODS.build({"method": "quarot"}).apply(model, context)
        results.append(model.network.state_dict())
        if folder is not None:  # the last block is missing, as after a kill
            for file in folder.glob("block-2.*"):
                file.unlink()
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in results[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounding": "hqq"}, "gptq, rtn"),
        ({"input_clip_ratio": 0.0}, "between 0.1 and 1"),
        ({"input_clip_ratio": 1.1}, "between 0.1 and 1"),
        ({"static_activations": True}, "leave static_activations out"),
        ({"input_activations": "int9"}, "no number format"),
        ({"damping": -1.0}, "damping"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        METHODS.build({"method": "quarot", **settings})


def test_other_networks_and_missing_data_are_refused() -> None:
    with pytest.raises(ModelError, match="post-norm"):
        quarot(Model(BUILDS["bert"]()))
    with pytest.raises(RecipeError, match="do not divide"):
        quarot(Model(BUILDS["llama"]()), group_size=128)
    with pytest.raises(DataError, match="calibration data"):
        METHODS.build({"method": "quarot"}).apply(Model(BUILDS["llama"]()), MethodContext())
    METHODS.build({"method": "quarot", "rounding": "rtn"}).apply(Model(BUILDS["llama"]()), MethodContext())
