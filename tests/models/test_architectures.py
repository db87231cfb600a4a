"""Networks of many architectures: they load, lose units and are quantized as their families say.

`benchmarks/architectures.py` checks all architectures, and more of each; here are one of each kind of quirk.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import smelt.compression.methods  # noqa: F401  (registers the methods)
from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.block_inputs import ReplayedInputs, capture_block_inputs
from smelt.compression.calibration.masks import masked, unit_masks
from smelt.errors import ModelError, RecipeError
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.config import config_from
from smelt.models.families import FAMILIES, GENERIC, family_of, has_family
from smelt.models.inputs import random_inputs
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.surgery import keep_units
from tests.architectures import ARCHITECTURES

# Fused q, k, v in chunks and interleaved, fused gate and up, parallel blocks, latent attention, layers without
# attention, sinks, stacked experts, shared blocks, encoder and decoder, two encoders, stages, audio, vision and
# language.
_PRUNED = (
    *("gemma2", "phi3", "gpt_neox", "modernbert", "phi", "deepseek_v3", "lfm2", "gpt_oss", "llama4_text", "albert"),
    *("t5", "whisper", "clip", "swin", "convnext", "wav2vec2", "nemotron", "stablelm", "llava", "deberta-v2", "helium"),
    "all_attention",
)
_QUANTIZED = (*_PRUNED, "mamba", "recurrent_gemma", "falcon", "qwen3_next")
# Model types of a row for which no tiny network is built above; their modules have the names of a relative.
_UNTRIED = {
    *("xlm-roberta", "camembert", "ernie", "hunyuan_v1_dense", "cwm", "ministral3", "mt5", "umt5", "mbart", "marian"),
    *("pegasus", "hubert", "dinov2_with_registers", "convnextv2", "glm4_moe_lite", "dots1", "falcon_mamba"),
    *("clip_text_model", "clip_vision_model", "siglip_text_model", "siglip_vision_model", "qwen2_vl_text"),
    *("qwen3_vl_text", "cifar_resnet"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("architectures")
    return {name: _save(name, root / name) for name in _QUANTIZED}


def _save(name: str, folder: Path) -> Path:
    ARCHITECTURES[name].save(folder)
    return folder


@torch.no_grad()
def _outputs(network: Any) -> list[Tensor]:
    outputs = network(**random_inputs(network)).values()
    return [output for output in outputs if isinstance(output, Tensor) and output.is_floating_point()]


def _assert_reloads(model: Model, folder: Path) -> None:
    folder.mkdir()
    save_artifact(model, folder)
    for actual, expected in zip(_outputs(load_artifact(folder).network), _outputs(model.network), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", _PRUNED)
def test_removed_units_are_masked_units(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model = load(folders[name])
    dense = copy.deepcopy(model.network)
    anatomy = anatomy_of(dense)
    removed = 0
    for part in model.anatomy.parts:
        if part.fixed is None:
            keep_units(model.network, part, range(1, part.units, 2))
            removed += 1
    assert removed
    kept, masks = {part.name: part.kept for part in model.anatomy.parts}, unit_masks(anatomy)
    for part, mask in zip(anatomy.parts, masks, strict=True):
        mask.zero_()[list(kept[part.name])] = 1
    with masked(anatomy, masks):
        expected = _outputs(dense)
    for actual, wanted in zip(_outputs(model.network), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=2e-4, rtol=1e-3)
    _assert_reloads(model, tmp_path / "pruned")


@pytest.mark.parametrize("name", _QUANTIZED)
def test_all_layers_of_blocks_are_quantized(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model = load(folders[name])
    linear = {
        path
        for block in model.anatomy.blocks
        for path, module in block.module.named_modules(prefix=block.path)
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
        and path.rpartition(".")[2] not in ("router", "shared_expert_gate")
    }
    step = METHODS.build({"method": "gptq", "bits": 4, "group_size": -1, "damping": 0.1})
    step.apply(model, MethodContext(batches=[random_inputs(model.network)]))
    skipped = {path for path in linear if path.endswith(("mixer.x_proj", "mixer.dt_proj"))}
    assert set(quantized_layers(model.network)) == linear - skipped
    _assert_reloads(model, tmp_path / "quantized")


def test_blocks_that_are_no_chain_are_replayed(folders: dict[str, Path]) -> None:
    """The Hessians of a decoder's layers need the encoder's output; a method that needs a chain says so."""
    for name, replayed in {"whisper": True, "swin": True, "recurrent_gemma": False, "gpt_neox": False}.items():
        model = load(folders[name])
        block_inputs = capture_block_inputs(model.anatomy, [random_inputs(model.network)])
        assert isinstance(block_inputs, ReplayedInputs) == replayed, name
    model = load(folders["whisper"])
    with pytest.raises(ModelError, match="do not follow one another; use gptq"):
        METHODS.build({"method": "awq", "bits": 4, "group_size": -1}).apply(
            model, MethodContext(batches=[random_inputs(model.network)])
        )


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "phi", "deepseek_v3", "qwen3_next", "nemotron", "phi3"])
def test_awq_scales_do_not_change_what_is_computed(name: str, folders: dict[str, Path]) -> None:
    """At 8 bits the error is that of rounding: a scale folded into a norm that others read, or that is stored minus
    one, would change the outputs by far more."""
    model = load(folders[name])
    before = _outputs(model.network)[0]
    step = METHODS.build({"method": "awq", "bits": 8, "group_size": -1})
    step.apply(model, MethodContext(batches=[random_inputs(model.network)]))
    assert (_outputs(model.network)[0] - before).abs().mean() < 0.05 * before.std()


def test_pruning_without_parts_names_the_way_out(folders: dict[str, Path]) -> None:
    for name in ("mamba", "recurrent_gemma"):
        with pytest.raises(ModelError, match=r"quantize it instead \(rtn, hqq or gptq\).*docs/adding-a-family.md"):
            METHODS.build({"method": "magnitude", "budget": {"parameters": 0.8}}).check(load(folders[name]).anatomy)


def test_a_repair_that_needs_a_plain_residual_is_refused(folders: dict[str, Path]) -> None:
    step = METHODS.build({"method": "magnitude", "budget": {"parameters": 0.8}, "repair": "full"})
    with pytest.raises(RecipeError, match="gemma2 networks do not; use repair: none"):
        step.check(load(folders["gemma2"]).anatomy)


def test_heads_that_cannot_be_removed_say_why(folders: dict[str, Path]) -> None:
    model = load(folders["gpt_oss"])
    with pytest.raises(ModelError, match="have an attention sink each"):
        keep_units(model.network, model.anatomy.parts[0], [0])
    albert = load(folders["albert"])
    with pytest.raises(ModelError, match="keep at least one"):
        keep_units(albert.network, albert.anatomy.parts[0], [])


def test_every_row_is_tried_or_named() -> None:
    """A row that no network is built for may be wrong; such types are listed above."""
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types))
    text_types = {"qwen2_5_vl_text"}  # inside of vision-language models
    assert {*types} - {*ARCHITECTURES} - text_types == _UNTRIED


def test_a_type_without_a_row_has_the_generic_family() -> None:
    assert not has_family("codegen") and family_of("codegen").name == GENERIC
    assert not family_of("codegen").prunable and family_of("llama").prunable


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("deberta_v2", "did you mean 'deberta-v2'"), ("gpt-oss", "did you mean 'gpt_oss'"), ("mamba3", "no such type")],
)
def test_an_unknown_type_is_refused_with_the_nearest_name(model_type: str, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        config_from({"model_type": model_type}, "config.json")


def test_published_configs_with_unusual_values_are_read() -> None:
    """DeBERTa has no token types; Mamba 2 has a limit of infinity."""
    assert config_from({"model_type": "deberta-v2", "type_vocab_size": 0}, "config.json").type_vocab_size == 0
    config = config_from({"model_type": "mamba2", "time_step_limit": [0.0, float("inf")]}, "config.json")
    assert config.time_step_limit[1] == float("inf")
