"""Rotations preserve the output of every family; unsupported networks are refused; artifacts store it all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.quantization.rotation import (
    Rotations,
    random_rotation,
    random_rotations,
    rotate_network,
)
from smelt.errors import ModelError, RecipeError
from smelt.kernels.hadamard import hadamard_transform
from smelt.measure.cost import count_bytes, count_parameters
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.model import Model
from smelt.models.surgery import set_output
from smelt.models.verify import verify
from smelt.numerics.catalog import FORMATS
from smelt.numerics.error import signal_to_noise
from tests.models.test_surgery import cut, random_masks
from tests.tiny import BUILDS, inputs

ROTATABLE = ("gpt2", "opt", "llama", "llama-tied", "mistral", "qwen2", "qwen3")


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMS norms that compute in float64; those of transformers always go through float32."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    for name in ("llama.LlamaRMSNorm", "mistral.MistralRMSNorm", "qwen2.Qwen2RMSNorm", "qwen3.Qwen3RMSNorm"):
        family, _, norm = name.partition(".")
        monkeypatch.setattr(f"transformers.models.{family}.modeling_{family}.{norm}.forward", forward)


def exact_model(name: str) -> Model:
    return Model(BUILDS[name]().double(), source=name)


def rotate(model: Model, seed: int = 0, **settings: object) -> dict[str, Any]:
    return METHODS.build({"method": "rotate", **settings}).apply(model, MethodContext(seed=seed))


@torch.no_grad()
def logits(model: Model) -> Tensor:
    name = model.source.removesuffix("-pruned")
    logits: Tensor = model.network(**inputs(name)).logits
    return logits


@pytest.mark.parametrize("keeps_mean", [False, True])
@pytest.mark.parametrize("size", [1, 2, 32, 36, 48, 58, 64])  # there is no Hadamard matrix of order 58
def test_a_random_rotation_is_orthogonal(size: int, keeps_mean: bool) -> None:
    matrix = random_rotation(size, torch.Generator().manual_seed(1), keeps_mean=keeps_mean)
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    if keeps_mean:
        ones = matrix @ torch.ones(size, dtype=torch.float64)
        assert torch.allclose(ones, torch.ones_like(ones), atol=1e-12)
    if size > 30:
        assert matrix.abs().max() < 5.5 / math.sqrt(size)
        other = random_rotation(size, torch.Generator().manual_seed(2), keeps_mean=keeps_mean)
        assert not torch.allclose(matrix, other)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("name", ROTATABLE)
def test_rotation_preserves_the_function(name: str) -> None:
    model = exact_model(name)
    before, parameters = logits(model), count_parameters(model.network)
    untouched = [table.weight.clone() for table in model.anatomy.embeddings]  # type: ignore[operator]
    facts = rotate(model)
    assert (logits(model) - before).abs().max() < 1e-10
    norms = [part.pre_norm for part in model.anatomy.parts] + [model.anatomy.final_norm]
    assert all(bool((norm.weight == 1).all()) for norm in norms)
    for table, old in zip(model.anatomy.embeddings, untouched, strict=True):
        assert not torch.allclose(table.weight, old, atol=0.01)  # type: ignore[arg-type]
    tied = name in ("gpt2", "opt", "llama-tied")
    assert facts["head_untied"] == tied and facts["parameters_added"] == (99 * 32 if tied else 0)
    assert count_parameters(model.network) == parameters + facts["parameters_added"]


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("name", ["llama", "qwen2", "opt", "gpt2"])
def test_rotation_preserves_a_pruned_network_with_added_biases(name: str) -> None:
    model = exact_model(name)
    cut(model.network, random_masks(model.network, empty=("heads1", "ffn_channels2")))
    for part in model.anatomy.parts:
        set_output(part, part.output.weight.clone(), 0.1 * torch.randn(part.output.out_features))
    before = logits(model)
    rotate(model)
    assert (logits(model) - before).abs().max() < 1e-10


@pytest.mark.usefixtures("exact_norms")
def test_a_width_without_a_hadamard_matrix_is_still_rotated() -> None:
    sizes = {"hidden_size": 58, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 2}
    for network in (
        hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, vocab_size=99, num_key_value_heads=1, head_dim=8)),
        hf.OPTForCausalLM(hf.OPTConfig(hidden_size=58, num_attention_heads=2, ffn_dim=24, num_hidden_layers=2,
                                       vocab_size=99, word_embed_proj_dim=58)),
    ):  # fmt: skip
        model = Model(network.double().eval(), source="llama")
        before = logits(model)
        rotate(model)
        assert (logits(model) - before).abs().max() < 1e-10


@pytest.mark.usefixtures("exact_norms")
def test_rotating_only_values_leaves_the_residual_stream_unchanged() -> None:
    model = exact_model("llama-tied")
    before, bytes_before = logits(model), count_bytes(model.network)
    old = [part.output.weight.clone() for part in model.anatomy.parts if part.kind == "heads"]
    rotate(model, residual=False)
    assert (logits(model) - before).abs().max() < 1e-10
    assert count_bytes(model.network) == bytes_before and model.network.config.tie_word_embeddings
    new = [part.output.weight for part in model.anatomy.parts if part.kind == "heads"]
    assert all(not torch.allclose(a, b, atol=1e-3) for a, b in zip(old, new, strict=True))


def test_low_precision_weights_are_cast_once() -> None:
    """Every weight is the float64 result rounded once, not the rounded result of rounded steps."""
    low, exact = BUILDS["llama"]().bfloat16(), BUILDS["llama"]().bfloat16().double()
    rotations = random_rotations(anatomy_of(low), seed=0)
    for network in (low, exact):
        rotate_network(anatomy_of(network), rotations)
    for (name, result), expected in zip(low.named_parameters(), exact.parameters(), strict=True):
        assert result.dtype == torch.bfloat16 and torch.equal(result, expected.bfloat16()), name


def test_outliers_are_spread() -> None:
    """A token's largest channel falls from many times its mean to that of Gaussian noise."""
    network = hf.LlamaForCausalLM(hf.LlamaConfig(hidden_size=256, intermediate_size=64, num_attention_heads=4,
                                                 num_hidden_layers=1, vocab_size=99)).eval()  # fmt: skip
    with torch.no_grad():
        network.model.embed_tokens.weight[:, 5] *= 60
    model = Model(network, source="llama")
    rows = network.model.embed_tokens.weight.detach()

    def peak(x: Tensor) -> float:
        return float((x.abs().amax(-1) / x.square().mean(-1).sqrt()).median())

    before = peak(rows)
    rotate(model)
    assert before > 10 and peak(network.model.embed_tokens.weight.detach()) < 4.5


def test_rotation_helps_coarse_scales_and_hurts_fine_blocks() -> None:
    """Four bits, 8 of 1024 channels forty times as large: decibels before and after, as on the method card."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1024, generator=generator)
    x[:, torch.randperm(1024, generator=generator)[:8]] *= 40
    turned = hadamard_transform(x)
    figures = {"int4": (11.0, 19.0), "mxfp4": (16.1, 19.0), "nvfp4": (22.6, 20.1), "amxfp4": (21.3, 19.8)}
    for name, (plain, rotated) in figures.items():
        rounded = FORMATS[name].fake_quantize
        assert signal_to_noise(x, rounded(x)) == pytest.approx(plain, abs=0.8), name
        assert signal_to_noise(turned, rounded(turned)) == pytest.approx(rotated, abs=0.8), name


@pytest.mark.parametrize("name", ["bert", "opt-post-norm", "distilbert", "mpnet", "resnet"])
def test_post_norm_networks_are_refused(name: str) -> None:
    model = Model(BUILDS[name](), source=name)
    before = {key: tensor.clone() for key, tensor in model.network.state_dict().items()}
    with pytest.raises(ModelError, match="post-norm"):
        rotate(model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.network.state_dict().items())


def test_other_networks_are_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="language models"):
        rotate(Model(BUILDS["vit"]()))
    with pytest.raises(ModelError, match="language models"):
        rotate(Model(hf.LlamaModel(BUILDS["llama"]().config)))
    narrow = hf.OPTConfig(hidden_size=32, word_embed_proj_dim=16, num_attention_heads=4, ffn_dim=48, vocab_size=99,
                          num_hidden_layers=1)  # fmt: skip
    with pytest.raises(ModelError, match="as wide as"):
        rotate(Model(hf.OPTForCausalLM(narrow)))
    packed = Model(BUILDS["llama"]())
    METHODS.build({"method": "rtn", "group_size": 16}).apply(packed, MethodContext())
    with pytest.raises(ModelError, match="quantized already"):
        rotate(packed)
    with pytest.raises(RecipeError, match="nothing to do"):
        METHODS.build({"method": "rotate", "residual": False, "values": False})


def test_a_bias_that_cannot_be_kept_is_refused_before_anything_changes() -> None:
    model = exact_model("gpt2")
    norm: Any = model.anatomy.final_norm
    with torch.no_grad():
        norm.weight[3] = 0.0
    before = logits(model)
    with pytest.raises(ModelError, match="weight is zero"):
        rotate(model)
    assert torch.equal(logits(model), before)
    with torch.no_grad():
        norm.bias[3] = 0.0
    before = logits(model)
    rotate(model)
    assert (logits(model) - before).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "opt"])
def test_an_artifact_round_trips_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = Model(BUILDS[name](), source=name)
    rotate(model)
    save_artifact(model, tmp_path)
    reloaded = load_artifact(tmp_path)
    assert torch.equal(logits(Model(reloaded.network, source=name)), logits(model))
    assert count_parameters(reloaded.network) == count_parameters(model.network)
    assert reloaded.network.config.tie_word_embeddings is False
    stock = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(Model(stock, source=name)), logits(model))


def test_it_is_verified_in_a_clean_process(tmp_path: Path) -> None:
    model = Model(BUILDS["llama-tied"](), source="llama-tied")
    rotate(model)
    save_artifact(model, tmp_path)
    verify(model, tmp_path)


def test_the_seed_determines_the_rotation() -> None:
    models = [Model(BUILDS["qwen3"](), source="qwen3") for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        rotate(model, seed=seed)
    first, same, other = (model.network.state_dict() for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.allclose(first["lm_head.weight"], other["lm_head.weight"], atol=1e-3)


def test_no_rotations_change_no_bit() -> None:
    network = BUILDS["llama"]()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    rotate_network(anatomy_of(network), Rotations())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert isinstance(network.get_output_embeddings(), nn.Linear)
