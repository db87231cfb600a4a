"""The quantized KV cache step: set by a recipe, saved with the model, used by everything that runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.quantization.kv_cache import KvCache
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.data import MultipleChoiceData, MultipleChoiceItem
from smelt.errors import ModelError, RecipeError
from smelt.export import export
from smelt.measure.divergence import logit_divergence
from smelt.measure.multiple_choice import evaluate_multiple_choice
from smelt.measure.perplexity import perplexity
from smelt.models.artifact import load_artifact, read_kv_cache_format, save_artifact
from smelt.models.kv_cache import KVCacheFormat, QuantizedKVCache
from smelt.models.model import Model
from smelt.models.verify import outputs, probe
from tests.character_tokenizer import character_tokenizer
from tests.tiny import BUILDS, inputs
from tests.trained import HELD_OUT

STEPS: list[dict[str, Any]] = [
    {"format": "int4-asym/4@float16"},
    {"format": "int2", "value_format": "none", "rotate_keys": False},
    {"format": "int8", "value_format": "mxfp4", "clip_ratio": 0.9},
]


def model_with_kv_format(**step: Any) -> Model:
    model = Model(BUILDS["llama"](), character_tokenizer())
    KvCache(**step).apply(model, MethodContext())
    return model


def generated(model: Model) -> tuple[Tensor, ...]:
    """Return the logits of each generated token, as `Model.generate` computes them."""
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    result: Any = model.network.generate(
        **inputs("llama"),
        **options,
        past_key_values=model.new_cache(),
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits: tuple[Tensor, ...] = result.logits
    return logits


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_reloaded_model_generates_with_the_same_logits(step: dict[str, Any], tmp_path: Path) -> None:
    model = model_with_kv_format(**step)
    save_artifact(model, tmp_path)
    loaded = load_artifact(tmp_path)
    assert loaded.kv == model.kv == read_kv_cache_format(tmp_path) is not None
    expected, plain = generated(model), generated(Model(model.network))
    assert all(torch.equal(a, b) for a, b in zip(generated(loaded), expected, strict=True))
    assert not torch.equal(expected[0], plain[0])
    assert loaded.generate("The cat") == model.generate("The cat")
    assert not torch.equal(outputs(loaded, probe(loaded)), outputs(Model(loaded.network), probe(loaded)))


def test_generation_and_multiple_choice_use_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, updated_caches = model_with_kv_format(format="int2"), []
    update = QuantizedKVCache.update

    def recording_update(self: QuantizedKVCache, *args: Any) -> Any:
        updated_caches.append(self)
        return update(self, *args)

    monkeypatch.setattr(QuantizedKVCache, "update", recording_update)
    model.generate("The cat", max_new_tokens=3)
    assert len({id(cache) for cache in updated_caches}) == 1 and len(updated_caches) == 3 * 3  # layers, tokens
    evaluate_multiple_choice(
        model, MultipleChoiceData("one", (MultipleChoiceItem(("The cat",) * 2, ("sat", "is a long way off"), 0),))
    )
    assert len(updated_caches) == 3 * 3 + 3  # both options in a batch


def test_every_metric_uses_it() -> None:
    """The model's cache format is the default, and an explicit one overrides it."""
    model, plain = (
        model_with_kv_format(format="int2", rotate_keys=False, rotate_values=False),
        Model(BUILDS["llama"](), character_tokenizer()),
    )
    settings: dict[str, Any] = {"context": 32, "limit": 128}
    remembered = perplexity(model, HELD_OUT, **settings).value
    assert remembered == perplexity(plain, HELD_OUT, kv="int2", **settings).value
    assert remembered != perplexity(plain, HELD_OUT, **settings).value
    assert perplexity(model, HELD_OUT, kv="none", **settings).value == perplexity(plain, HELD_OUT, **settings).value
    assert logit_divergence(model, plain, HELD_OUT, **settings).kl > 1e-6
    assert logit_divergence(plain, model, HELD_OUT, **settings).kl > 1e-6  # as the baseline, too
    assert abs(logit_divergence(model, model, HELD_OUT, **settings).kl) < 1e-9


def test_it_survives_other_steps_and_can_be_removed() -> None:
    model = model_with_kv_format(format="int8")
    RoundToNearest(bits=4, group_size=16).apply(model, MethodContext())
    assert model.kv == KVCacheFormat("int8", rotate_keys=True, rotate_values=True)
    facts = KvCache(format="none").apply(model, MethodContext())
    numbers = 3 * 2 * 2 * 8  # layers, key and value, heads, head_dim
    assert facts == {
        "kv_cache_bits_per_token_before": 3 * 2 * 2 * (8 * 8 + 32),
        "kv_cache_bits_per_token_after": 32 * numbers,
    }
    assert model.kv is None and model.new_cache() is None


def test_artifacts_without_the_field_and_with_a_broken_one(tmp_path: Path) -> None:
    save_artifact(Model(BUILDS["llama"]()), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    assert "kv" not in content
    assert (
        load_artifact(tmp_path).kv is None
        and read_kv_cache_format(tmp_path) is None
        and read_kv_cache_format("no/such") is None
    )
    for broken in ("int8", {"format": "int9"}, {"format": 8}, {"bits": 8}, {"format": "int8", "clip": 2.0}, None):
        (tmp_path / "smelt.json").write_text(json.dumps({**content, "kv": broken}))
        with pytest.raises(ModelError, match=r"smelt\.json: (this does not describe|there is no|the clip ratio)"):
            load_artifact(tmp_path)


def test_invalid_settings_raise_one_sentence() -> None:
    with pytest.raises(RecipeError, match="kv-cache: there is no number format 'int9'; `smelt formats` lists them"):
        METHODS.build({"method": "kv-cache", "format": "int9"})
    with pytest.raises(RecipeError, match="kv-cache: there is no number format 'x'"):
        METHODS.build({"method": "kv-cache", "value_format": "x"})
    with pytest.raises(RecipeError, match="between 0 and 1"):
        METHODS.build({"method": "kv-cache", "clip_ratio": 0})
    with pytest.raises(ModelError, match="generate text"):
        KvCache().apply(Model(BUILDS["bert"]()), MethodContext())
    assert METHODS.build({"method": "kv-cache", "clip_ratio": 1}).to_json()["clip_ratio"] == 1  # an integer, as in YAML
    assert type(KvCache(clip_ratio=1).kv.clip) is float


def test_an_export_reports_that_it_is_left_out(tmp_path: Path) -> None:
    result = export(model_with_kv_format(format="int8"), "gguf", tmp_path / "model.gguf", tokenizer=False)
    assert [note for note in result["notes"] if "the KV cache format int8 is left out" in note]
    plain = export(Model(BUILDS["llama"]()), "gguf", tmp_path / "plain.gguf", tokenizer=False)
    assert not any("keys" in note for note in plain["notes"])
