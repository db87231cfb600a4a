"""Attention map reuse in encoders of speech: wav2vec2, and the encoder of Whisper, whose decoder stays as it is."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.compression.base import MethodContext
from smelt.compression.calibration.attention_similarity import jensen_shannon, map_divergences
from smelt.compression.methods import METHODS
from smelt.errors import ModelError
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.attention_reuse import reuse_attention
from smelt.models.model import Model
from tests.architectures import OTHERS

LAYERS = {"whisper": {"encoder_layers": 4, "decoder_layers": 2}, "wav2vec2": {"num_hidden_layers": 4}}
LIST = {"whisper": "model.encoder.layers", "wav2vec2": "wav2vec2.encoder.layers"}


def build(name: str) -> PreTrainedModel:
    architecture = next(each for each in OTHERS if each.model_type == name)
    return replace(architecture, fields={**architecture.fields, **LAYERS[name]}).build()


def audio(name: str, seed: int = 0) -> dict[str, Tensor]:
    """Two recordings; of wav2vec2 the second is shorter, by a mask of samples."""
    generator = torch.Generator().manual_seed(seed)
    if name == "whisper":
        ids = torch.randint(3, 90, (2, 5), generator=generator)
        return {"input_features": torch.randn(2, 16, 64, generator=generator), "decoder_input_ids": ids}
    mask = torch.ones(2, 400, dtype=torch.int64)
    mask[1, 250:] = 0
    return {"input_values": torch.randn(2, 400, generator=generator), "attention_mask": mask}


def encoder_layers(network: PreTrainedModel, name: str) -> Any:
    return network.get_submodule(LIST[name])


def attention_of(layer: Any) -> Any:
    return layer.self_attn if hasattr(layer, "self_attn") else layer.attention


@torch.no_grad()
def maps_and_mask(network: PreTrainedModel, name: str, batch: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return transformers' maps of the encoder, and which frames are no padding."""
    network = copy.deepcopy(network)
    network.set_attn_implementation("eager")
    output = network(**batch, output_attentions=True)
    maps = output.encoder_attentions if name == "whisper" else output.attentions
    if name == "whisper":
        return list(maps), torch.ones(maps[0].shape[0], maps[0].shape[2], dtype=torch.bool)
    mask = network.base_model._get_feature_vector_attention_mask(maps[0].shape[2], batch["attention_mask"])
    return list(maps), mask.bool()


@pytest.mark.parametrize("name", list(LAYERS))
def test_divergences_are_those_of_the_encoder_without_padding(name: str) -> None:
    network, batch = build(name), audio(name)
    maps, mask = maps_and_mask(network, name, batch)
    assert name == "whisper" or not mask.all()
    wanted = [float(jensen_shannon(a, b).mean(1)[mask].mean()) for a, b in pairwise(maps)]
    np.testing.assert_allclose(map_divergences(anatomy_of(network), [batch]), [0.0, *wanted], rtol=1e-4)


@pytest.mark.parametrize("name", list(LAYERS))
def test_a_layer_computes_its_values_with_the_map_of_the_leader(name: str) -> None:
    """The oracle multiplies by hand in a copy of the network, with transformers' map of the first layer."""
    network, batch = build(name), audio(name)
    oracle = copy.deepcopy(network)
    oracle.set_attn_implementation("eager")
    first, second = (attention_of(layer) for layer in list(encoder_layers(oracle, name))[:2])
    kept: list[Tensor] = []
    first.register_forward_hook(lambda _, __, output: kept.append(output[1]))

    def by_hand(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        values = module.v_proj(hidden).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        return (module.out_proj((kept[-1] @ values).transpose(1, 2).flatten(2)), *output[1:])

    second.register_forward_hook(by_hand, with_kwargs=True)
    model = Model(network)
    with torch.no_grad():
        dense = network(**batch).logits
        wanted = oracle(**batch).logits
        reuse_attention(model.anatomy, {1: 0})
        shared = network(**batch).logits
    torch.testing.assert_close(shared, wanted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(shared, dense, atol=1e-3)


@pytest.mark.parametrize("name", list(LAYERS))
def test_the_method_shares_maps_of_the_encoder_only(name: str, tmp_path: Path) -> None:
    batches, distances = [audio(name, seed) for seed in range(4)], {}
    with torch.no_grad():
        dense = build(name)(**batches[0]).logits
    for repair in ("none", "full"):
        model = Model(build(name))
        facts = METHODS.build({"method": "attention-reuse", "layers": 0.5, "separate": 0, "repair": repair}).apply(
            model, MethodContext(batches=batches)
        )
        assert len(facts["maps_of"]) == 2 and max(map(int, facts["maps_of"])) < 4
        with torch.no_grad():
            distances[repair] = float((model.network(**batches[0]).logits - dense).square().mean())
    assert distances["full"] < distances["none"]
    save_artifact(model, tmp_path)
    with torch.no_grad():
        again = load_artifact(tmp_path).network(**batches[0]).logits
        assert torch.equal(again, model.network(**batches[0]).logits)
    projections = [path for path, module in model.network.named_modules() if path.endswith("k_proj")]
    assert len(projections) == (2 + 4 if name == "whisper" else 2)  # Whisper's decoder attends twice per layer
    with pytest.raises(ModelError, match="a map of their own each"):
        METHODS.build("attention-reuse").apply(model, MethodContext(batches=batches))


def test_generation_of_whisper_is_that_without_a_cache() -> None:
    model, batch = Model(build("whisper")), audio("whisper")
    reuse_attention(model.anatomy, {1: 0, 2: 0})
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    features = batch["input_features"]
    cached = model.network.generate(features, use_cache=True, **settings)
    assert torch.equal(cached, model.network.generate(features, use_cache=False, **settings))


def test_modules_are_gone() -> None:
    model = Model(build("wav2vec2"))
    reuse_attention(model.anatomy, {1: 0})
    owner: nn.Module = attention_of(encoder_layers(model.network, "wav2vec2")[1])
    assert {name for name, _ in owner.named_children()} == {"v_proj", "out_proj"}
