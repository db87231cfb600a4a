"""Costs are what surgery really frees, and equal published counts."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from smelt.measure.cost import (
    Workload,
    block_cost,
    block_parameters,
    count_parameters,
    unit_costs,
    unit_parameters,
)
from smelt.models.anatomy import anatomy_of
from smelt.models.surgery import keep_units
from tests.tiny import BUILDS


@pytest.mark.parametrize("name", BUILDS)
def test_unit_prices_are_what_surgery_frees(name: str) -> None:
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
    """A quarter of the groups and filters of the middle layers removed, as LLM-Pruner's own tables report it."""
    with torch.device("meta"):
        network = hf.LlamaForCausalLM(hf.LlamaConfig(**config, tie_word_embeddings=False))
    for position, part in enumerate(anatomy_of(network).parts):
        if part.block in layers:
            part = anatomy_of(network).parts[position]
            keep_units(network, part, range(part.units - part.units // 4))
    assert count_parameters(network) == expected


def test_prices_of_llama_3_8b() -> None:
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
