"""Artifacts round-trip bit for bit, here and in a clean process; equal models give equal bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from smelt.errors import ModelError
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.model import Model
from smelt.models.surgery import keep_units, set_output
from smelt.models.verify import verify
from tests.character_tokenizer import character_tokenizer
from tests.models.test_surgery import cut, random_masks
from tests.tiny import BUILDS, TRANSFORMERS, inputs


def pruned(name: str) -> Model:
    network = BUILDS[name]()
    cut(network, random_masks(network, empty=("heads1", "ffn_channels2") if name in TRANSFORMERS else ()))
    return Model(network, source=name)


@pytest.mark.parametrize("name", BUILDS)
@torch.no_grad()
def test_save_and_load_is_bit_identical(name: str, tmp_path: Path) -> None:
    model = pruned(name)
    save_artifact(model, tmp_path)
    reloaded = load_artifact(tmp_path)
    assert torch.equal(reloaded.network(**inputs(name)).logits, model.network(**inputs(name)).logits)
    assert reloaded.anatomy.shape() == model.anatomy.shape()
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".bin"] == []


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        save_artifact(pruned("llama"), tmp_path / folder)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_an_added_bias_survives(tmp_path: Path) -> None:
    model = pruned("llama")
    part = model.anatomy.parts[0]
    set_output(part, part.output.weight.clone(), torch.randn(part.output.out_features))
    save_artifact(model, tmp_path)
    reloaded = load_artifact(tmp_path)
    assert torch.equal(reloaded.network(**inputs("llama")).logits, model.network(**inputs("llama")).logits)


@pytest.mark.parametrize("name", ["llama-tied", "bert", "resnet"])
def test_it_is_verified_in_a_clean_process(name: str, tmp_path: Path) -> None:
    model = pruned(name)
    save_artifact(model, tmp_path)
    verify(model, tmp_path)
    with torch.no_grad():
        next(iter(model.network.parameters())).add_(1e-3)
    with pytest.raises(ModelError, match="differ"):
        verify(model, tmp_path)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_verifying_process_computes_like_this_one(enabled: bool, tmp_path: Path) -> None:
    """PyTorch disables oneDNN for good on a CPU that lacks a dtype, which changes the last bits."""
    model = pruned("resnet")
    save_artifact(model, tmp_path)
    with torch.backends.mkldnn.flags(enabled=enabled):
        verify(model, tmp_path)


def test_different_layer_widths_are_in_the_per_layer_configuration(tmp_path: Path) -> None:
    model = pruned("qwen3")
    save_artifact(model, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.is_heterogeneous
    for block in model.anatomy.blocks:
        layer = config.per_layer_config[block.index]
        heads, filters = block.parts
        assert (layer.num_key_value_heads, layer.intermediate_size) == (heads.units, filters.units)


@torch.no_grad()
def test_equal_widths_load_in_transformers(tmp_path: Path) -> None:
    network = BUILDS["llama"]()
    for position in range(len(anatomy_of(network).parts)):
        part = anatomy_of(network).parts[position]
        keep_units(network, part, range(1, part.units))
    save_artifact(Model(network), tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(stock(**inputs("llama")).logits, network(**inputs("llama")).logits)
    reloaded = load_artifact(tmp_path)
    assert reloaded.anatomy.shape() == anatomy_of(network).shape()


@torch.no_grad()
def test_heads_that_do_not_divide_the_hidden_size_reload(tmp_path: Path) -> None:
    """Transformers refuses such a configuration in its standard fields."""
    sizes = {"hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, intermediate_size=16, num_hidden_layers=2, vocab_size=99)
    network = transformers.LlamaForCausalLM(config).eval()
    for part in anatomy_of(network).parts[::2]:
        keep_units(network, part, [0, 1, 3])
    save_artifact(Model(network), tmp_path)
    tokens = torch.arange(12)[None]
    assert torch.equal(load_artifact(tmp_path).network(tokens).logits, network(tokens).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": 10**9}, "does not fit"),
        ({"units": -1}, "does not fit"),
        ({"units": "2"}, "does not fit"),
        ({"kept": [0, 0]}, "does not fit"),
        ({"kept": ["a"]}, "does not fit"),
        ({"part": "model.layers.0.evil"}, "does not name"),
    ],
)
def test_a_forged_shape_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    save_artifact(pruned("llama"), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    content["shape"][0].update(change)
    (tmp_path / "smelt.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        load_artifact(tmp_path)


def test_a_kept_unit_beyond_the_original_ones_is_refused(tmp_path: Path) -> None:
    save_artifact(pruned("llama"), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    entry = next(entry for entry in content["shape"] if entry.get("kept"))
    entry["kept"][-1] = entry["of"]
    (tmp_path / "smelt.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="does not fit"):
        load_artifact(tmp_path)


def test_a_shape_that_contradicts_the_weights_is_refused(tmp_path: Path) -> None:
    save_artifact(pruned("bert"), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    filters = next(entry for entry in content["shape"] if entry["kind"] == "ffn_channels" and entry["units"] > 1)
    filters["units"] -= 1
    (tmp_path / "smelt.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="and not"):
        load_artifact(tmp_path)


def test_a_saved_tokenizer_forgets_its_last_call(tmp_path: Path) -> None:
    """Tokenizers keep truncation and padding; the files are the same before, after, and once loaded again."""
    tokenizer = character_tokenizer(encoder=True)
    for name in "abc":
        (tmp_path / name).mkdir()
        save_artifact(Model(BUILDS["bert"](), tokenizer), tmp_path / name)
        if name == "b":
            tokenizer = load_artifact(tmp_path / "b").tokenizer
        assert tokenizer is not None
        tokenizer(["one text", "two"], truncation=True, max_length=4, padding="max_length")
    contents = [(tmp_path / name / "tokenizer.json").read_bytes() for name in "abc"]
    plain = json.loads(contents[0])
    assert len(set(contents)) == 1 and plain["truncation"] is plain["padding"] is None
    configs = [json.loads((tmp_path / name / "tokenizer_config.json").read_text()) for name in "abc"]
    assert all("max_length" not in config and config["model_max_length"] for config in configs)
