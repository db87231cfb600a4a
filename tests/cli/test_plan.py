"""`smelt plan`: refuses what cannot fit without loading weights; its estimates are close to a real run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from smelt.compression.base import METHODS
from smelt.compression.channel_search.base import ChannelSearch
from smelt.compression.pruning.expert_pruning import ExpertPruning
from smelt.compression.pruning.gated import GatedPruning
from smelt.compression.token_pruning.base import TokenPruning
from smelt.measure.cost import count_bytes
from smelt.models.load import load
from tests.character_tokenizer import character_tokenizer
from tests.cli.conftest import Forked, Place, Smelt, bert_recipe, llama_recipe
from tests.mixtures import saved
from tests.tiny import BUILDS

SIZES = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 768}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("data", [{"samples": 10**9}, {"seq_len": 10**9}, {"batch_size": 10**8, "samples": 10**8}])
def test_what_cannot_fit_is_refused_before_anything_is_read(
    data: dict[str, int], place: Place, smelt_here: Smelt, tmp_path: Path
) -> None:
    for method in ("fisher", "wanda-sp"):
        content = llama_recipe(place, method=method)
        content["data"] |= data
        arguments = [place / "llama", "-r", place.recipe("huge.yaml", content), "-o", str(tmp_path / "out")]
        for command in ("plan", "compress"):
            done = smelt_here(command, *arguments)
            done.refused("of memory and")
            assert "loading" not in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_planning_reads_no_weights(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    """A sparse file stands for a terabyte of weights that no machine could load."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(place / "llama").iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(2**40)
    assert smelt_here("plan", str(folder), "-r", place / "llama.yaml", "-o", str(tmp_path / "out")).code == 0


# They only precede or follow a quantization method, quantize no weights, or are for policies or encoders.
NOT_ALONE = ("rilq", "rotate", "kv-cache", "slice", "sqil", "integer-qat")
UNUSUAL_TARGETS: dict[str, set[str]] = {"attention-reuse": set(), "finetune": set(), "carve-experts": {"active_width"}}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", [name for name in METHODS if name not in NOT_ALONE])
def test_every_method_can_be_planned(name: str, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    parameters = {field.name for field in dataclasses.fields(METHODS[name])}
    removes, trains = "budget" in parameters, "epochs" in parameters and "weights" in parameters
    model, content = place / "llama", llama_recipe(place, method=name)
    if issubclass(METHODS[name], TokenPruning):
        model, content = place / "bert", bert_recipe(place, method=name, budget={"macs": 0.6})
    elif issubclass(METHODS[name], ExpertPruning):
        model = str(tmp_path / "mixture")
        saved("qwen3-moe", Path(model))
        character_tokenizer().save_pretrained(model)
    elif name == "finetune":
        content["steps"] = [{"method": name}]
    elif issubclass(METHODS[name], GatedPruning):
        content["steps"] = [{"method": name, "budget": {"heads": 0.5}}]
    elif issubclass(METHODS[name], ChannelSearch):
        model, content = str(tmp_path / "resnet"), llama_recipe(place, method=name, budget={"macs": 0.9})
        BUILDS["resnet"]().save_pretrained(model)
    elif trains:
        quantizer = {"quantizer": "minmax", "weight_format": "int4/row"}
        if name == "matquant":
            quantizer = {"quantizer": "nested", "weight_format": "int8/row"}
        content["steps"] = [{"method": name, "weights": quantizer}]
    elif name == "carve-experts":
        content["steps"] = [{"method": name, "domains": [place / "text.txt"] * 2}]
    elif not removes:
        content["steps"] = [{"method": name, **({"group_size": -1} if "group_size" in parameters else {})}]
    recipe = place.recipe(f"{name}.yaml", content)
    done = smelt_here("plan", model, "-r", recipe, "--json", str(tmp_path / "r.json"))
    assert done.code == 0, done
    (step,) = json.loads((tmp_path / "r.json").read_text())["steps"]
    assert step["method"] == name
    if issubclass(METHODS[name], ChannelSearch):
        assert step["budget"] == {"macs": 0.9, "parameters": 1.0}
    elif removes:
        assert step["budget"] == content["steps"][0]["budget"]
    else:
        assert step["budget"].keys() == UNUSUAL_TARGETS.get(name, {"bits"})


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "step",
    [
        {"method": "rtn", "bits": 4, "group_size": 16},
        {"method": "rtn", "format": "nvfp4"},
        {"method": "gptq", "bits": 3, "group_size": -1, "symmetric": True},
        {"method": "mixed", "bits": 5.0, "group_size": -1},
        {"method": "magnitude", "budget": {"parameters": 0.8}, "alignment": 1},
    ],
    ids=lambda step: "-".join(str(value) for value in step.values()),
)
def test_the_size_of_the_result_is_close_to_the_estimate(
    step: dict[str, Any], place: Place, smelt_here: Smelt, tmp_path: Path
) -> None:
    recipe = place.recipe("size.yaml", {**llama_recipe(place), "steps": [step]})
    arguments = [place / "llama", "-r", recipe, "-o", str(tmp_path / "out")]
    assert smelt_here("plan", *arguments, "--json", str(tmp_path / "r.json")).code == 0
    foreseen = json.loads((tmp_path / "r.json").read_text())
    done = smelt_here("compress", *arguments, "--no-speed")
    assert done.code == 0, done.err
    actual = count_bytes(load(tmp_path / "out").network)
    assert actual < foreseen["bytes"]
    tolerance = 0.03 if step["method"] in ("mixed", "magnitude") else 1e-6  # a search ends below its budget
    assert foreseen["bytes_after"] == pytest.approx(actual, rel=tolerance)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to plan for")
def test_a_plan_for_a_gpu_needs_one(place: Place, smelt_here: Smelt) -> None:
    smelt_here("plan", place / "llama", "-r", place / "llama.yaml", "--device", "cuda").refused("there is no GPU here")


@pytest.mark.parametrize("method", ["fisher", "wanda-sp"])
def test_the_peak_memory_is_close_to_the_estimate(method: str, place: Place, forked: Forked, tmp_path: Path) -> None:
    """Of a complete run in a separate process, as reported by the OS; the estimate includes what its process has."""
    config = transformers.LlamaConfig(**SIZES, vocab_size=8000, num_key_value_heads=4, max_position_embeddings=256)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    content = llama_recipe(place, method=method)
    content["data"] |= {"samples": 16 if method == "wanda-sp" else 8, "seq_len": 256, "batch_size": 8}
    arguments = [str(tmp_path / "model"), "-r", place.recipe("memory.yaml", content), "-o", str(tmp_path / "out")]
    assert forked("plan", *arguments, "--json", str(tmp_path / "r.json")).code == 0
    foreseen = json.loads((tmp_path / "r.json").read_text())["peak_memory"]
    done = forked("compress", *arguments, "--no-speed")
    assert done.code == 0, done
    assert 0.7 * done.peak_bytes < foreseen < 3 * done.peak_bytes, (foreseen, done.peak_bytes)
