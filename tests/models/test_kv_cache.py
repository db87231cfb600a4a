"""The quantized KV cache: exact without a format, as small as its bits, and usable for generation."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from typer.testing import CliRunner

from smelt.cli.app import app_with
from smelt.compression.recipe.recipe import EvaluationSettings
from smelt.data import TextData
from smelt.data.labeled import LabeledData
from smelt.errors import DataError, FormatError, ModelError
from smelt.measure.divergence import logit_divergence
from smelt.measure.evaluate import measure_quality
from smelt.measure.perplexity import perplexity
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import save_artifact
from smelt.models.kv_cache import PackedLayer, PackedRows, QuantizedKVCache
from smelt.models.model import Model
from smelt.models.surgery import keep_units
from smelt.numerics.catalog import FORMATS, get_format
from smelt.numerics.error import signal_to_noise
from tests.character_tokenizer import character_tokenizer
from tests.tiny import BUILDS, DECODER, DECODERS, inputs

TEXT = TextData("fox", ("The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. " * 5,))
GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@lru_cache(maxsize=1)
def trained() -> Model:
    """A small Llama trained on a little text."""
    torch.manual_seed(0)
    model = Model(hf.LlamaForCausalLM(hf.LlamaConfig(**{**DECODER, "num_hidden_layers": 2})), character_tokenizer())
    assert model.tokenizer is not None
    tokens = torch.tensor(model.tokenizer(TEXT.joined)["input_ids"])
    optimizer = torch.optim.Adam(model.network.parameters(), lr=1e-2)
    for _ in range(60):
        starts = torch.randint(len(tokens) - 32, (4,))
        rows = torch.stack([tokens[start : start + 32] for start in starts])
        model.network(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.network.eval()
    return model


def rows(name: str, **settings: Any) -> PackedRows:
    return PackedRows(get_format(name), settings.get("clip", 1.0), settings.get("rotate", False))


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_no_format_changes_nothing(name: str) -> None:
    network = BUILDS[name]()
    expected = network(**inputs(name), use_cache=False).logits
    logits = network(**inputs(name), past_key_values=QuantizedKVCache(network.config, "none")).logits
    assert torch.equal(logits, expected)
    for beams in (1, 3):
        plain = network.generate(**inputs(name), **GREEDY, num_beams=beams)
        cache = QuantizedKVCache(network.config, "none")
        assert torch.equal(network.generate(**inputs(name), **GREEDY, num_beams=beams, past_key_values=cache), plain)
        assert cache.get_seq_length() == plain.shape[1] - 1


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_decode_matches_prefill(name: str) -> None:
    network = BUILDS[name]()
    ids = inputs(name)["input_ids"]
    full = network(ids, past_key_values=QuantizedKVCache(network.config, "int4-asym")).logits
    cache = QuantizedKVCache(network.config, "int4-asym")
    steps = [network(ids[:, :4], past_key_values=cache, use_cache=True).logits]
    for position in range(4, ids.shape[1]):
        steps.append(network(ids[:, position : position + 1], past_key_values=cache, use_cache=True).logits)
    plain = network(ids, use_cache=False).logits
    result = torch.cat(steps, 1)
    # a value on the edge between two steps may fall on either side
    assert (result - full).norm() < 0.1 * (full - plain).norm()
    assert (full - plain).norm() > 1e-3 * plain.norm()


@torch.no_grad()
def test_beam_search_reorders_the_quantized_cache() -> None:
    """Eight bits give the same beams as no quantization; a cache that is not reordered gives others."""
    network = BUILDS["gpt2"]()
    plain = network.generate(**inputs("gpt2"), **GREEDY, num_beams=4)
    cache = QuantizedKVCache(network.config, "int8")
    assert torch.equal(network.generate(**inputs("gpt2"), **GREEDY, num_beams=4, past_key_values=cache), plain)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@torch.no_grad()
def test_networks_without_an_attention_layer_generate(name: str) -> None:
    network = BUILDS[name]()
    keep_units(network, anatomy_of(network).parts[0], [])
    keep_units(network, anatomy_of(network).parts[2], [1])
    for number_format in ("none", "int8", "int4-asym/128@float16"):
        cache = QuantizedKVCache(network.config, number_format, rotate_keys=True)
        out = network.generate(**inputs(name), **GREEDY, num_beams=2, past_key_values=cache)
        assert out.shape == (3, 21) and cache.layers[0].rows[0].head_dim == 1
        if number_format == "none":
            assert torch.equal(out, network.generate(**inputs(name), **GREEDY, num_beams=2))


@pytest.mark.parametrize("name", ["int8", "int4", "int4-asym@float16", "int3/16", "int4-asym/32", "mxfp4", "fp8-e4m3"])
@torch.no_grad()
def test_its_size_matches_its_bits(name: str) -> None:
    config = hf.LlamaConfig(hidden_size=128, head_dim=64, num_attention_heads=2, num_key_value_heads=1,
                            num_hidden_layers=3, intermediate_size=16, vocab_size=99)  # fmt: skip
    network = hf.LlamaForCausalLM(config).eval()
    cache = QuantizedKVCache(config, name)
    network(**inputs("llama", batch=2, length=20), past_key_values=cache, use_cache=True)
    numbers = 2 * 3 * 2 * 20 * 64  # keys and values, layers, sequences, tokens, head_dim
    assert cache.nbytes * 8 == numbers * get_format(name).bits_per_value(64)


def test_eight_bits_barely_change_a_trained_model() -> None:
    model = trained()
    plain = perplexity(model, TEXT, context=32, limit=320)
    assert plain.value < 20  # it is trained
    values = {name: perplexity(model, TEXT, context=32, limit=320, kv=name).value for name in ("none", "int8", "int2")}
    assert values["none"] == plain.value
    assert values["int8"] == pytest.approx(plain.value, rel=0.01)
    assert values["int2"] > 1.05 * plain.value
    same, less = (logit_divergence(model, model, TEXT, context=32, limit=320, kv=kv) for kv in ("none", "int4"))
    assert abs(same.kl) < 1e-9 < less.kl


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_supports_chunked_appends(name: str) -> None:
    x = torch.randn(2, 3, 7, 16)
    cache = rows(name)
    for chunk in x.split((4, 1, 2), dim=2):
        cache.append(chunk)
    assert cache.tokens == 7 and cache.values().shape == x.shape
    number_format = FORMATS[name]
    if number_format.tensor_amax(x) is None:  # a row does not depend on those around it
        assert torch.equal(cache.values(), number_format.fake_quantize(x))
    assert signal_to_noise(x, cache.values()) > 1.5


def test_per_tensor_scales_become_per_row() -> None:
    config = BUILDS["llama"]().config
    layer: Any = QuantizedKVCache(config, "int4/tensor").layers[0]
    x = torch.randn(1, 2, 5, 8) * torch.tensor([1.0, 100.0]).view(1, 2, 1, 1)
    keys, values = layer.update(x, -x)
    assert torch.equal(keys, get_format("int4").fake_quantize(x)) and torch.equal(
        values, get_format("int4").fake_quantize(-x)
    )


def test_keys_and_values_may_have_separate_formats() -> None:
    layer: Any = QuantizedKVCache(BUILDS["llama"]().config, "int8", "int2").layers[1]
    x = torch.randn(1, 2, 5, 8)
    keys, values = layer.update(x, x)
    assert torch.equal(keys, FORMATS["int8"].fake_quantize(x)) and torch.equal(values, FORMATS["int2"].fake_quantize(x))


def test_dtypes_are_kept_and_clipping_narrows_the_range() -> None:
    x = torch.randn(1, 1, 3, 64).bfloat16()
    cache = rows("int4", clip=0.5)
    cache.append(x)
    assert cache.values().dtype == torch.bfloat16
    assert bool((cache.values().abs().amax(-1) < 0.7 * x.abs().amax(-1)).all())


@pytest.mark.parametrize("width", [8, 12, 64, 80])  # those of 12 and 80 are not their own inverse
def test_rotated_keys_are_rotated_back_and_lose_less_to_outliers(width: int) -> None:
    x = torch.randn(2, 2, 9, width)
    x[..., 3] *= 25
    plain, rotated, fine = rows("int4"), rows("int4", rotate=True), rows("int8", rotate=True)
    for cache in (plain, rotated, fine):
        cache.append(x)
    rest = torch.arange(width) != 3
    assert signal_to_noise(x, fine.values()) > 35
    assert signal_to_noise(x[..., rest], rotated.values()[..., rest]) > signal_to_noise(
        x[..., rest], plain.values()[..., rest]
    )


def test_a_width_without_a_hadamard_matrix_is_not_rotated() -> None:
    x = torch.randn(1, 1, 4, 58)
    cache = rows("int8", rotate=True)
    cache.append(x)
    assert torch.equal(cache.values(), FORMATS["int8"].fake_quantize(x))


def filled_layer(name: str = "int4-asym") -> tuple[PackedLayer, Tensor, Tensor]:
    layer: Any = QuantizedKVCache(BUILDS["llama"]().config, name).layers[0]
    keys, values = layer.update(torch.randn(3, 2, 6, 8), torch.randn(3, 2, 6, 8))
    return layer, keys, values


def stored_kv(layer: PackedLayer) -> tuple[Tensor, Tensor]:
    return layer.rows[0].values(), layer.rows[1].values()


def test_cache_operations_of_generation() -> None:
    order = torch.tensor([2, 0, 0])
    changes: list[tuple[str, Any, Any]] = [
        ("reorder_cache", order, lambda x: x[order]),
        ("batch_select_indices", torch.tensor([1]), lambda x: x[1:2]),
        ("batch_repeat_interleave", 2, lambda x: x.repeat_interleave(2, 0)),
        ("crop", -2, lambda x: x[:, :, :4]),
        ("crop", 0, lambda x: x),
    ]
    for name, argument, expected in changes:
        layer, keys, values = filled_layer()
        getattr(layer, name)(argument)
        assert all(torch.equal(a, expected(b)) for a, b in zip(stored_kv(layer), (keys, values), strict=True)), name
        assert layer.get_seq_length() == expected(keys).shape[2]
    layer, keys, values = filled_layer()
    layer.offload()
    layer.prefetch()
    assert torch.equal(stored_kv(layer)[0], keys)
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.get_mask_sizes(3) == (3, 0)
    with pytest.raises(ValueError, match="negative"):
        layer.crop(2)


def test_invalid_settings_are_refused() -> None:
    config = BUILDS["llama"]().config
    with pytest.raises(FormatError, match="int9"):
        QuantizedKVCache(config, "int9")
    with pytest.raises(FormatError, match="between 0 and 1"):
        QuantizedKVCache(config, "int8", clip=0.0)
    mixed = hf.LlamaConfig(**DECODER)
    mixed.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="linear_attention"):
        QuantizedKVCache(mixed, "int8")
    with pytest.raises(FormatError, match="int9"):
        perplexity(trained(), TEXT, context=32, kv="int9")
    labeled = LabeledData("rows", ("a",), None, torch.tensor([0]).numpy(), False)
    with pytest.raises(DataError, match="evaluated on text"):
        measure_quality(trained(), labeled, **EvaluationSettings().options(), kv="int8")


def test_the_command(tmp_path: Path) -> None:
    save_artifact(trained(), tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(TEXT.joined)
    arguments = ["eval", str(tmp_path), "--data", str(text), "--context", "32", "--limit", "96"]
    arguments += ["--kv-cache-dtype", "int2"]
    result = CliRunner().invoke(
        app_with("eval"), [*arguments, "--against", str(tmp_path), "--json", str(tmp_path / "out.json")]
    )
    assert result.exit_code in (0, 3), result.output  # 3: the quantized cache is measurably worse
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["kv"] == "int2" and content["divergence"]["kl"] > 1e-4
    assert content["quality"]["value"] != content["base_quality"]["value"]
