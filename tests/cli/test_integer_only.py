"""Models become integers by the command line: saved, verified, gated, compared and inspected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from smelt.models.load import load
from smelt.runtime.integer.decoder_network import IntegerDecoder
from tests.cli.conftest import Place, Smelt, llama_recipe


def test_integer_only_ends_like_any_compression(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    out = str(tmp_path / "integer")
    data = ("--data", place / "rows.jsonl", "--eval-data", place / "rows.jsonl")
    done = smelt_here("compress", place / "bert", "--method", "integer-only", *data, "-o", out, "--max-drop", "5pt")
    assert done.code == 0, done.err
    assert "gate passed" in done.out and "saved and verified" in done.out
    quality = smelt_here("eval", out, "--data", place / "rows.jsonl", "--against", place / "bert")
    assert quality.code == 0, quality.err
    inspected = smelt_here("inspect", out, "--json", str(tmp_path / "inspect.json"))
    assert "signal to quantization noise" in inspected.out, inspected.err
    content = json.loads((tmp_path / "inspect.json").read_text())
    assert content["sqnr_db"]["classifier (linear)"] > 10
    compressed = ("--method", "rtn", "-o", str(tmp_path / "twice"))
    smelt_here("compress", out, *compressed).refused("runs a program, which no step can change")


def test_what_has_no_integer_form_is_one_sentence(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = ("--method", "integer-only", "--data", place / "rows.jsonl", "--eval-data", place / "rows.jsonl")
    shutil.copytree(place / "bert", tmp_path / "silu")
    config = json.loads((tmp_path / "silu" / "config.json").read_text())
    (tmp_path / "silu" / "config.json").write_text(json.dumps({**config, "hidden_act": "silu"}))
    done = smelt_here("compress", str(tmp_path / "silu"), *arguments, "-o", str(tmp_path / "out"))
    done.refused("bert.encoder.layer.0.intermediate.intermediate_act_fn: the activation silu has no integer form")
    network = load(place / "bert").network
    with torch.no_grad():
        norm = network.get_submodule("bert.encoder.layer.1.output.LayerNorm")
        assert isinstance(norm, torch.nn.LayerNorm)
        norm.weight.fill_(1e-12)
        norm.bias.fill_(1e3)
    shutil.copytree(place / "bert", tmp_path / "extreme")
    network.save_pretrained(tmp_path / "extreme")
    done = smelt_here("compress", str(tmp_path / "extreme"), *arguments, "-o", str(tmp_path / "out"))
    done.refused("bert.encoder.layer.1.output.LayerNorm: ")
    done.refused("too large for int32")
    assert not (tmp_path / "out").exists()
    arguments = ("--method", "integer-only", "--data", "none", "-o", str(tmp_path / "synthetic"))
    smelt_here("compress", place / "bert", *arguments).refused("this network has none; name data")


def test_a_decoder_becomes_integers_with_its_kv_cache(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    content = {**llama_recipe(place), "steps": [{"method": "integer-only"}]}
    out, recipe = str(tmp_path / "out"), place.recipe("integer.yaml", content)
    done = smelt_here("compress", place / "llama", "-r", recipe, "-o", out, "--max-drop", "5%", "--no-speed")
    assert done.code == 0, done.err
    assert "gate passed" in done.out
    network = load(out).network
    assert isinstance(network, IntegerDecoder)
    ids = torch.arange(2, 8)[None]
    step = network(ids, use_cache=True)
    assert {layer.keys.dtype for layer in step.past_key_values.layers} == {torch.int8}
    evaluated = smelt_here("eval", out, "--data", place / "text.txt", "--limit", "500")
    assert evaluated.code == 0, evaluated.err


def test_another_type_is_refused_before_it_is_loaded(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    shutil.copytree(place / "llama", tmp_path / "gemma")
    config = json.loads((tmp_path / "gemma" / "config.json").read_text())
    (tmp_path / "gemma" / "config.json").write_text(json.dumps({**config, "model_type": "gemma"}))
    done = smelt_here("compress", str(tmp_path / "gemma"), "--method", "integer-only", "-o", str(tmp_path / "out"))
    done.refused("there is no integer form of gemma networks")
