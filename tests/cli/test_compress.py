"""`smelt compress`: a folder that loads, within its budget, the same bytes for the same seed, for every method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from smelt.compression.budget import MEASURES
from smelt.compression.methods import METHODS
from smelt.compression.pruning.base import StructuredPruning
from smelt.compression.quantization.base import Quantization
from smelt.measure.cost import block_parameters, count_bytes, count_parameters
from smelt.models.load import load
from tests.character_tokenizer import character_tokenizer
from tests.cli.conftest import Done, Place, Smelt, bert_recipe, llama_recipe, same_bytes

PRUNING = [name for name, cls in METHODS.items() if issubclass(cls, StructuredPruning)]
REPAIRS = [(name, repair) for name in PRUNING for repair in ("none", "tune", "full")] + [("flap", "bias")]
QUICK: dict[str, dict[str, int]] = {
    "omniquant": {"epochs": 1}, "flexround": {"iterations": 4}, "spinquant": {"steps": 2},
    "brecq": {"iterations": 4, "activation_iterations": 4},
}  # fmt: skip
QUANTIZERS = [name for name, cls in METHODS.items() if issubclass(cls, Quantization)]
BUDGET = {"parameters": 0.8}


def compress(smelt_here: Smelt, place: Place, model: str, content: Any, out: Path, *more: str) -> Done:
    recipe = place.recipe(f"{model}-given.yaml", content)
    return smelt_here("compress", place / model, "-r", recipe, "-o", str(out), "--no-speed", *more)


def record(out: Path) -> Any:
    return json.loads((out / "measurements.json").read_text())


def kept(out: Path, what: str) -> float:
    size = record(out)["size"][what]
    return size["after"] / size["before"]


def test_a_complete_run(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    """With verification in a clean process, timing, prompts and the result as JSON."""
    out, written = tmp_path / "deep" / "out", tmp_path / "r.json"
    arguments = ["-r", place / "llama.yaml", "-o", str(out), "--json", str(written), "--prompt", "the cat"]
    done = smelt_here("compress", place / "llama", *arguments, "--speed-seconds", "600")
    assert done.code == 0, done
    assert {"config.json", "model.safetensors", "smelt.json", "measurements.json", "report.html", "tokenizer.json"} <= {
        file.name for file in out.iterdir()
    }
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    model, report = load(out), json.loads(written.read_text())
    assert report == record(out)
    assert report["size"]["parameters"]["after"] == count_parameters(model.network)
    assert report["size"]["bytes"]["after"] == count_bytes(model.network)
    before = block_parameters(load(place / "llama").anatomy)
    assert report["size"]["block_parameters"] == {"before": before, "after": block_parameters(model.anatomy)}
    assert 0.7 * before < block_parameters(model.anatomy) <= 0.8 * before
    assert report["quality"]["before"] < report["quality"]["after"] < 1.2 * report["quality"]["before"]
    sizes = [row["streams"] for row in report["engine"]["after"]["rows"]]
    assert sizes[:3] == [1, 8, 64] and [row["streams"] for row in report["engine"]["before"]["rows"]] == sizes
    assert [entry["name"].split(",")[1].split()[0] for entry in report["speed"]] == list(map(str, sizes))
    assert report["engine"]["after"]["backend"] in (out / "report.html").read_text()
    for entry in report["speed"]:
        assert entry["after"]["median_ms"] > 0 and entry["after"]["first_token_ms"] > 0
    assert "tokens/s, first token" in done.out and "tokens/s, first token" in (out / "report.html").read_text()
    assert [sample["who"] for sample in report["samples"]] == ["before", "after"]
    assert "perplexity" in done.out and "saved and verified" in done.out and "before: " in done.out
    assert [step["method"] for step in model.history] == ["fisher"]


def test_a_classifier_by_its_recipe_and_then_eval(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    arguments = ["-r", place / "bert.yaml", "-o", str(tmp_path / "out"), "--no-speed"]
    assert smelt_here("compress", place / "bert", *arguments).code == 0
    report = record(tmp_path / "out")
    assert report["quality"]["metric"] == "accuracy"
    assert len(report["predictions"]) == 6 and report["predictions"][0].keys() == {"text", "label", "before", "after"}
    done = smelt_here("eval", str(tmp_path / "out"), "--data", place / "rows.jsonl", "--min", "0.9")
    assert done.code == 0, done.out


@pytest.mark.parametrize(("name", "repair"), REPAIRS)
def test_every_method_with_every_repair(
    name: str, repair: str, place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    content = llama_recipe(place, method=name, repair=repair, budget=BUDGET)
    done = compress(smelt_here, place, "llama", content, tmp_path / "out")
    assert done.code == 0, done
    assert 0.7 < kept(tmp_path / "out", "block_parameters") <= 0.8
    assert record(tmp_path / "out")["quality"]["after"] < 2.0


@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_quantization_method(name: str, place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    content = llama_recipe(place)
    content["steps"] = [{"method": name, "bits": 8, "group_size": -1, **QUICK.get(name, {})}]
    done = compress(smelt_here, place, "llama", content, tmp_path / "out")
    assert done.code == 0, done
    report = record(tmp_path / "out")
    assert report["size"]["bytes"]["after"] < 0.6 * report["size"]["bytes"]["before"]
    assert report["quality"]["after"] < 1.3 * report["quality"]["before"]
    assert [sample["who"] for sample in report["samples"]] == ["before", "after"]  # without a prompt, one by default
    assert all(layer["bits"] > 2 for block in report["precision"] for layer in block["layers"].values())
    assert (tmp_path / "out" / "report.html").exists()


def test_a_repair_uses_data_even_if_the_scores_need_none(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    """The default data, where none is named; a repair without data would fit a zero bias."""
    content = llama_recipe(place, method="magnitude", repair="full")
    del content["data"]["source"]
    assert compress(smelt_here, place, "llama", content, tmp_path / "out").code == 0
    assert load(tmp_path / "out").network.model.layers[0].mlp.down_proj.bias.abs().max() > 0


@pytest.mark.parametrize("measure", [measure for measure in MEASURES if measure not in ("latency", "heads")])
def test_a_budget_for_each_metric(measure: str, place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    content = bert_recipe(place, budget={measure: 0.75}, repair="none", seq_len=128)
    done = compress(smelt_here, place, "bert", content, tmp_path / "out")
    assert done.code == 0, done
    if measure == "bytes":  # of one decoded token, with its share of the cache, so weights alone are not it
        assert 0.5 < kept(tmp_path / "out", "block_parameters") < 0.95
    else:
        assert 0.68 < kept(tmp_path / "out", "macs" if measure == "macs" else "block_parameters") <= 0.75


def test_a_latency_budget(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    """On a network large enough that fewer units take less time."""
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=1024, vocab_size=99
    )
    transformers.BertForSequenceClassification(config).save_pretrained(place / "wide")
    character_tokenizer(encoder=True).save_pretrained(place / "wide")
    content = bert_recipe(place, budget={"latency": 0.7}, repair="none", seq_len=128)
    content["data"]["samples"] = 8
    done = compress(smelt_here, place, "wide", content, tmp_path / "out")
    assert done.code == 0, done
    assert 0.3 < kept(tmp_path / "out", "macs") < 0.9


def test_a_pruned_model_can_be_pruned_again(
    place: Place, smelt_here: Smelt, quick: None, pruned: Path, tmp_path: Path
) -> None:
    content = llama_recipe(place, budget={"parameters": 0.8})
    recipe = place.recipe("again.yaml", content)
    out = tmp_path / "out"
    done = smelt_here("compress", str(pruned), "-r", recipe, "-o", str(out), "--no-speed")
    assert done.code == 0, done
    once, twice = load(pruned), load(out)
    assert block_parameters(twice.anatomy) <= 0.8 * block_parameters(once.anatomy)
    assert [step["budget"] for step in twice.history] == [{"parameters": 0.7}, {"parameters": 0.8}]
    assert twice.anatomy.parts[1].original_units == 48


def test_the_same_seed_gives_the_same_bytes_and_another_seed_differs(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    content = llama_recipe(place)
    for name, seed in (("one", "7"), ("two", "7"), ("other", "8")):
        assert compress(smelt_here, place, "llama", content, tmp_path / name, "--seed", seed).code == 0
    assert same_bytes(tmp_path / "one", tmp_path / "two")
    assert not same_bytes(tmp_path / "one", tmp_path / "other")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other")]
    assert weights[0] != weights[1]


def test_activations_spilled_to_disk_change_nothing(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    content = llama_recipe(place)
    assert compress(smelt_here, place, "llama", content, tmp_path / "free").code == 0
    content["memory_limit"] = "10 kB"
    assert compress(smelt_here, place, "llama", content, tmp_path / "limited").code == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("free", "limited")]
    assert weights[0] == weights[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["free", "limited"]


def test_a_language_model_calibrates_on_a_named_text_column_of_labeled_rows(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    content = llama_recipe(place)
    content["data"] |= {"source": place / "rows.jsonl", "text": "sentence"}
    assert compress(smelt_here, place, "llama", content, tmp_path / "out").code == 0


def test_text_that_looks_like_markup_is_printed_verbatim(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generated text is untrusted; chat models produce text like this."""
    monkeypatch.setattr("smelt.models.model.Model.generate", lambda model, prompt: "[/INST] :smile: [red]")
    done = compress(smelt_here, place, "llama", llama_recipe(place), tmp_path / "out", "--prompt", "hello")
    assert done.code == 0, done
    assert "after: hello … [/INST] :smile: [red]" in done.out


@pytest.mark.shared
def test_a_real_small_model(shared: Path, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    """stories260K with a tenth of its blocks' parameters removed still generates stories."""
    recipe = tmp_path / "recipe.yaml"
    data = "data: {samples: 16, length: 128}\nevaluate: {context: 128, limit: 4096}\n"
    recipe.write_text(f"{data}steps: [{{method: fisher, budget: {{parameters: 0.9}}}}]\n")
    arguments = ["-r", str(recipe), "-o", str(tmp_path / "out"), "--no-speed", "--prompt", "Once upon a time"]
    done = smelt_here("compress", str(shared / "weights" / "stories260K"), *arguments)
    assert done.code == 0, done
    report = record(tmp_path / "out")
    assert report["size"]["block_parameters"]["after"] <= 0.9 * report["size"]["block_parameters"]["before"]
    assert report["quality"]["after"] < 1.1 * report["quality"]["before"]
    assert all(len(sample["text"]) > 20 for sample in report["samples"])
