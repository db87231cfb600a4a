"""Loading a local folder never contacts the hub, whatever its files name."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from smelt.errors import ModelError
from smelt.models import network
from smelt.models.config import config_from
from smelt.models.load import load, skeleton
from smelt.models.model_types import NESTED, check_loadable, is_loadable
from tests.architectures import ARCHITECTURES
from tests.security.limits import refused, write_model

ROOT = Path(__file__).parents[2]
BEACON = "attacker/beacon"
_BACKBONE = {"backbone": BEACON, "use_pretrained_backbone": True, "use_timm_backbone": False, "backbone_config": None}
_TIMM = {**_BACKBONE, "use_timm_backbone": True}
_SECOND = {"model_type": "dpt", **_BACKBONE, "_name_or_path": BEACON, "auto_map": {"AutoConfig": f"{BEACON}--x.X"}}

# Types that transformers 5 builds around a second model, which a field may name on the hub.
_BACKBONE_TYPES = (
    *("dpt", "detr", "conditional_detr", "deformable_detr", "table-transformer", "maskformer", "mask2former"),
    *("oneformer", "upernet", "vitmatte", "tvp", "depth_anything", "prompt_depth_anything", "zoedepth", "rt_detr"),
    *("rt_detr_v2", "d_fine", "omdet-turbo", "grounding-dino", "mm-grounding-dino", "superglue", "timm_wrapper"),
    "timm_backbone",
)  # fmt: skip
_REFUSED: dict[str, dict[str, Any]] = {
    **{f"backbone of {name}": {"model_type": name, **_BACKBONE} for name in _BACKBONE_TYPES},
    "timm backbone": {"model_type": "dpt", **_TIMM},
    "vision encoder-decoder": {"model_type": "vision-encoder-decoder", "encoder": _SECOND, "decoder": _SECOND},
    "encoder-decoder": {"model_type": "encoder-decoder", "encoder": {"model_type": "bert"}, "decoder": _SECOND},
    "text and vision": {"model_type": "llava", "text_config": _SECOND, "vision_config": _SECOND},
    "audio": {"model_type": "speech-encoder-decoder", "encoder": _SECOND, "decoder": _SECOND},
    "retrieval": {"model_type": "rag", "question_encoder": _SECOND, "generator": _SECOND, "dataset": BEACON},
    "code predictor": {"model_type": "musicgen", "text_encoder": _SECOND, "audio_encoder": _SECOND, "decoder": _SECOND},
    "quantizer": {"quantization_config": {"quant_method": "quark", "checkpoint": BEACON}},
    "quantizer of its own": {"quantization_config": {"quant_method": BEACON, "auto_map": {"X": BEACON}}},
}
_IGNORED: dict[str, dict[str, Any]] = {
    "backbone of llama": _BACKBONE,
    "second model in llama": dict.fromkeys(("text_config", "vision_config", "encoder", "decoder"), _SECOND),
    "list of second models": {"backbone_config": [_SECOND], "sub_configs": [[_SECOND]], "language_config": _SECOND},
    "attention kernel": {"_attn_implementation_internal": BEACON, "attn_implementation": f"kernels-community/{BEACON}"},
    "attention kernel, nested": {"rope_parameters": {"rope_type": "default", "_attn_implementation": BEACON}},
    "paths": {"_name_or_path": BEACON, "name_or_path": BEACON, "base_model_name_or_path": BEACON, "peft_type": "LORA"},
    "remote code": {"auto_map": {"AutoConfig": f"{BEACON}--x.X", "AutoModelForCausalLM": f"{BEACON}--x.X"}},
    "pipelines": {"custom_pipelines": {"x": {"impl": BEACON}}, "distributed_config": {"x": BEACON}},
    "revision": {"revision": BEACON, "_commit_hash": "0" * 40, "trust_remote_code": True, "use_auth_token": True},
    "weights": {"transformers_weights": f"https://{BEACON}", "gguf_file": BEACON, "use_kernels": True},
}
_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"},
}
# Further files of the folder.
_FILES: dict[str, dict[str, Any]] = {
    "tokenizer": {"tokenizer_config.json": {"name_or_path": BEACON, "tokenizer_class": "PreTrainedTokenizerFast"}},
    "mistral tokenizer": {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "fix_mistral_regex": True}},
    "tokenizer in files elsewhere": {"tokenizer_config.json": {"vocab_file": BEACON, "tokenizer_file": BEACON}},
    "remote tokenizer": {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": [f"{BEACON}--x.X", None]}}},
    "retrieval tokenizer": {"tokenizer_config.json": {"tokenizer_class": "RagTokenizer", "name_or_path": BEACON}},
    "adapter": {"adapter_config.json": {"base_model_name_or_path": BEACON, "peft_type": "LORA"}},
    "generation": {"generation_config.json": {"custom_generate": BEACON, "assistant_model": BEACON}},
    "processors": {name: {"auto_map": {"X": BEACON}} for name in ("preprocessor_config.json", "processor_config.json")},
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("hostile")
    for name, changes in {**_REFUSED, **_IGNORED}.items():
        write_model(root / name, **changes)
    for name, files in _FILES.items():
        folder = write_model(root / name)
        (folder / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
        for file, content in files.items():
            (folder / file).write_text(json.dumps(content))
    folders = sorted(str(path) for path in root.iterdir())
    assert len(folders) >= 45
    command = [sys.executable, "-m", "tests.security.hub_attempts", *folders]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    content = json.loads(ran.stdout.splitlines()[-1])
    return {"controls": content["controls"], **{Path(key).name: value for key, value in content["folders"].items()}}


def test_attempts_are_counted_and_offline_mode_ends(results: dict[str, Any]) -> None:
    assert results["controls"]["plain"] > 0 and results["controls"]["afterward"] > 0
    assert results["controls"]["offline"] == 0


@pytest.mark.parametrize("name", _REFUSED)
def test_a_config_that_brings_a_second_model_is_refused(name: str, results: dict[str, Any]) -> None:
    assert results[name]["attempts"] == []
    expected = "already quantized" if "quantizer" in name else "which Smelt does not load"
    assert all(expected in outcome for outcome in results[name]["outcomes"]), results[name]


@pytest.mark.parametrize("name", _IGNORED)
def test_a_field_that_names_something_on_the_hub_is_ignored(name: str, results: dict[str, Any]) -> None:
    assert results[name] == {"attempts": [], "outcomes": ["loaded", "loaded"]}


@pytest.mark.parametrize("name", _FILES)
def test_other_files_do_not_reach_the_hub(name: str, results: dict[str, Any]) -> None:
    assert results[name]["attempts"] == []
    assert all(outcome == "loaded" or outcome.startswith("the tokenizer in") for outcome in results[name]["outcomes"])


# Calls of a modeling file that fetch, or that build a network by a name.
_FETCHES = re.compile(r"from_pretrained|load_backbone|cached_file|hub_download|get_kernel|torch\.load|create_model")
# They are in methods that a user calls: wav2vec2 fetches the adapter of another language.
_ON_REQUEST = {"wav2vec2"}


@pytest.mark.slow
def test_a_loadable_type_neither_fetches_nor_builds_another_model() -> None:
    """A new version of transformers could change that, or add such a type: then add it to those that are refused."""
    loadable = [model_type for model_type in CONFIG_MAPPING if is_loadable(model_type)]
    assert len(loadable) > 400
    offending = {}
    for model_type in loadable:
        config_class = CONFIG_MAPPING[model_type]
        assert not config_class.sub_configs or model_type in NESTED
        module = importlib.util.find_spec(config_class.__module__.replace(".configuration_", ".modeling_"))
        if module is None or module.origin is None:  # a config without a network of its own
            continue
        source = Path(module.origin).read_text()
        nodes = ast.walk(ast.parse(source)) if _FETCHES.search(source) else ()
        calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
        offending[model_type] = [name for name in calls if _FETCHES.search(name)]
    assert {model_type for model_type, calls in offending.items() if calls} == _ON_REQUEST


@pytest.mark.parametrize("model_type", sorted(NESTED & set(CONFIG_MAPPING)))
def test_a_nested_config_is_of_a_loadable_type(model_type: str) -> None:
    for config_class in CONFIG_MAPPING[model_type].sub_configs.values():
        nested = getattr(config_class, "model_type", "")
        if nested:  # otherwise the config names the type, which is then checked, or it is a group of settings
            check_loadable(nested, model_type, nested=True)


@pytest.mark.parametrize(
    "nested",
    [
        {"model_type": "llava", "text_config": {"model_type": "llama"}},  # a nested config has none itself
        {"model_type": "clip_vision_model", "hidden_size": 2**30},
        {"model_type": "clip_vision_model", "num_hidden_layers": 10**6},
        {"model_type": ["clip_vision_model"]},
        {"model_type": "timm_wrapper", "architecture": BEACON},
    ],
)
def test_a_nested_config_is_checked_like_the_outer_one(nested: dict[str, Any]) -> None:
    values = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": nested}
    with pytest.raises(ModelError):
        config_from(values, "config.json")


def test_a_nested_config_of_another_type_than_the_class_is_refused() -> None:
    with pytest.raises(ModelError, match="which it cannot contain"):
        config_from({"model_type": "clip", "text_config": {"model_type": "llama"}}, "config.json")


def test_instructions_in_a_nested_config_are_dropped() -> None:
    text = {"model_type": "llama", "_attn_implementation": BEACON, "auto_map": {"AutoConfig": f"{BEACON}--x.X"}}
    config = config_from({"model_type": "llava", "text_config": text}, "config.json")
    assert BEACON not in json.dumps(config.to_dict(), default=str)


def test_computed_tables_are_bounded_before_memory_is_allocated(tmp_path: Path) -> None:
    """Position tables that no file holds, of 4 GiB for each block."""
    ARCHITECTURES["gptj"].save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_positions": 2**27}))
    assert "tables of" in refused(lambda: load(tmp_path))


def test_the_number_of_modules_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "_MAX_MODULES", 10)
    assert "more than 10 modules" in refused(lambda: skeleton(write_model(tmp_path / "model")))
