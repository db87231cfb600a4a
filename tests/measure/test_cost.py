"""Costs match what surgery frees, and published counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from smelt.compression.base import MethodContext
from smelt.compression.quantization.rilq import Rilq
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.compression.recipe.plan import plan
from smelt.compression.recipe.recipe import Recipe
from smelt.measure.cost import (
    Workload,
    active_parameters,
    block_cost,
    block_parameters,
    count_bytes,
    count_parameters,
    unit_costs,
    unit_parameters,
)
from smelt.measure.structure import describe_structure
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import save_artifact
from smelt.models.experts import split_experts
from smelt.models.load import skeleton
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.surgery import keep_units
from tests.mixtures import CHOSEN, EXPERTS, fused
from tests.tiny import BUILDS

RANK = 3


@pytest.mark.parametrize("name", BUILDS)
def test_unit_costs_are_what_surgery_frees(name: str) -> None:
    network = BUILDS[name]()
    workload = Workload(tokens=16, image_size=32)
    for position in range(len(anatomy_of(network).parts)):
        for measure in ("parameters", "macs"):
            anatomy = anatomy_of(network)
            part = anatomy.parts[position]
            price = unit_costs(anatomy, measure, workload)[position]
            before = block_cost(anatomy, measure, workload)
            keep_units(network, part, range(1, part.units))
            assert before - block_cost(anatomy_of(network), measure, workload) == price


def test_card_formula_for_an_encoder() -> None:
    anatomy = anatomy_of(BUILDS["bert"]())
    d, d_h, s = 32, 8, 25
    head, filters = unit_costs(anatomy, "macs", Workload(tokens=s))[:2]
    assert head == 3 * s * d * d_h + 2 * s * s * d_h + s * d_h * d
    assert filters == 2 * s * d


@pytest.mark.parametrize(
    ("config", "layers", "expected"),
    [
        (
            {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256},
            range(4, 30),
            6_612_586_496,
        ),
        (
            {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
             "num_key_value_heads": 4, "vocab_size": 32000},
            range(4, 18),
            945_907_712,
        ),
    ],
    ids=["llama-3-8b", "tinyllama-1.1b"],
)  # fmt: skip
def test_published_parameter_counts_of_llm_pruner(config: dict[str, int], layers: range, expected: int) -> None:
    """Remove a quarter of the groups and channels of the middle layers, as in LLM-Pruner's tables."""
    with torch.device("meta"):
        network = hf.LlamaForCausalLM(hf.LlamaConfig(**config, tie_word_embeddings=False))
    for position, part in enumerate(anatomy_of(network).parts):
        if part.block in layers:
            part = anatomy_of(network).parts[position]
            keep_units(network, part, range(part.units - part.units // 4))
    assert count_parameters(network) == expected


def test_unit_costs_of_llama_3_8b() -> None:
    with torch.device("meta"):
        network = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32,
                num_key_value_heads=8, vocab_size=10,
            )
        )  # fmt: skip
    anatomy = anatomy_of(network)
    assert [unit_parameters(part) for part in anatomy.parts] == [5_242_880, 12_288]
    assert block_parameters(anatomy) == 8 * 5_242_880 + 14336 * 12_288 + 2 * 4096


def with_factors(build: Callable[[], hf.PreTrainedModel]) -> tuple[Model, Model]:
    """Return a quantized model, and the same one with low-rank factors on every layer."""
    plain, model = (Model(build()) for _ in range(2))
    for variant in (plain, model):
        RoundToNearest(bits=4, group_size=16).apply(variant, MethodContext())
    for layer in quantized_layers(model.network).values():
        layer.add_low_rank_factors(torch.randn(RANK, layer.in_features), torch.randn(layer.out_features, RANK))
    return plain, model


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_low_rank_factors_are_counted(name: str, tmp_path: Path) -> None:
    """In memory and from a saved folder without weights: parameters, bytes on disk, MACs per token."""
    plain, model = with_factors(BUILDS[name])
    layers = quantized_layers(model.network).values()
    added = RANK * sum(layer.in_features + layer.out_features for layer in layers)
    before, after = (describe_structure(variant.anatomy, 7) for variant in (plain, model))
    assert after["parameters"] - before["parameters"] == added
    assert after["block_parameters"] - before["block_parameters"] == added
    assert after["bytes"] - before["bytes"] == 4 * added
    assert after["macs"] - before["macs"] == 7 * added
    assert sum(block["macs"] for block in after["blocks"]) == after["macs"]
    assert sum(block["parameters"] for block in after["blocks"]) == after["block_parameters"]
    save_artifact(model, tmp_path)
    assert describe_structure(anatomy_of(skeleton(tmp_path)), 7) == after
    tensors = load_file(tmp_path / "model.safetensors").values()
    assert count_bytes(model.network) == sum(tensor.nbytes for tensor in tensors)


def test_a_plan_counts_the_factors_that_will_be_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smelt.compression.recipe.plan.matrix_speed", lambda *_: 1e10)
    _, model = with_factors(BUILDS["llama"])
    save_artifact(Model(BUILDS["llama"]()), tmp_path)
    quantizer = RoundToNearest(bits=4, group_size=16)
    planned = plan(str(tmp_path), Recipe((quantizer, Rilq(rank=RANK))))
    assert planned.block_parameters_after == block_parameters(model.anatomy)
    merged = plan(str(tmp_path), Recipe((quantizer, Rilq(rank=RANK, merge=True))))
    assert merged.block_parameters_after == merged.block_parameters


def test_factors_of_selected_experts_are_counted() -> None:
    plain, model = with_factors(lambda: split_experts(fused("mixtral")))
    expected, tokens = 0.0, 5
    for path, layer in quantized_layers(model.network).items():
        share = CHOSEN / EXPERTS if ".experts." in path else 1
        expected += share * RANK * (layer.in_features + layer.out_features)
    work = Workload(tokens=tokens)
    met = [block_cost(variant.anatomy, "macs", work) for variant in (plain, model)]
    assert met[1] - met[0] == pytest.approx(tokens * expected)
    assert active_parameters(model.anatomy) - active_parameters(plain.anatomy) == pytest.approx(expected)
