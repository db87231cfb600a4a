"""Every step is checked, before any work, on the shapes that the steps before it leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from smelt.compression.base import MethodContext
from smelt.compression.recipe.recipe import Recipe
from smelt.compression.recipe.step_checks import check_steps
from smelt.errors import BudgetError, ModelError, RecipeError
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from tests.tiny import BUILDS

PRUNE = {"budget": {"parameters": 0.8}}


def llama(device: str = "meta") -> PreTrainedModel:
    """Four heads of 8 and 64 channels in every block."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=4, head_dim=8, vocab_size=99, max_position_embeddings=64)
    return LlamaForCausalLM(config).eval().to(device)


def recipe(*steps: dict[str, Any]) -> Recipe:
    return Recipe.parse({"steps": list(steps)})


def check(*steps: dict[str, Any]) -> PreTrainedModel:
    network = llama()
    check_steps(network, recipe(*steps))
    return network


def test_a_group_that_does_not_divide_an_exact_pruned_width() -> None:
    """Magnitude keeps the same number everywhere, so the width is known: 4 heads, and 53 channels or a multiple."""
    prune = {"method": "magnitude", "budget": {"parameters": 0.9}}
    quantize = {"method": "rtn", "group_size": 16}
    with pytest.raises(RecipeError, match=r"^step 2 \(rtn\): .*down_proj has 53 inputs, which groups of 16 do not"):
        check(prune, quantize)
    network = check({**prune, "ffn_multiple": 16}, quantize)
    assert {part.units for part in anatomy_of(network).parts} == {4, 48}


def test_a_group_that_may_not_divide_a_width_decided_by_scores() -> None:
    quantize = {"method": "gptq", "group_size": 16}
    with pytest.raises(RecipeError, match=r"step 2 \(gptq\): groups of 16 may not .* use `head_multiple: 2` in fisher"):
        check({"method": "fisher", **PRUNE, "ffn_multiple": 16}, quantize)
    with pytest.raises(RecipeError, match=r"keeps some multiple of 4; use `ffn_multiple: 16` in flap, or `allow_part"):
        check({"method": "flap", **PRUNE, "ffn_multiple": 4, "head_multiple": 2}, quantize)
    check({"method": "fisher", **PRUNE, "ffn_multiple": 16, "head_multiple": 2}, quantize)
    check({"method": "fisher", **PRUNE}, {**quantize, "allow_partial_group": True})
    check({"method": "fisher", **PRUNE}, {**quantize, "group_size": -1})


def test_all_units_may_be_kept() -> None:
    """Multiples of 24 do not divide 64 channels, all of which a block may keep: only 8 is certain."""
    prune = {"method": "fisher", "budget": {"parameters": 0.9}, "ffn_multiple": 24, "head_multiple": 4}
    check(prune, {"method": "rtn", "group_size": 8})
    with pytest.raises(RecipeError, match=r"fisher keeps some multiple of 8; use `ffn_multiple: 16` in fisher"):
        check(prune, {"method": "rtn", "group_size": 16})


def test_two_pruning_steps_guarantee_their_common_divisor() -> None:
    first = {"method": "fisher", **PRUNE, "ffn_multiple": 16, "head_multiple": 4}
    second = {"method": "flap", "budget": {"parameters": 0.9}, "ffn_multiple": 8, "head_multiple": 4}
    check(first, second, {"method": "rtn", "group_size": 8})
    with pytest.raises(RecipeError, match=r"step 3 \(rtn\): groups of 16 may not .* multiple of 8"):
        check(first, second, {"method": "rtn", "group_size": 16})


@pytest.mark.parametrize(
    ("steps", "error", "words"),
    [
        (({"method": "rtn", "group_size": 8}, {"method": "magnitude", **PRUNE}), ModelError, "already quantized"),
        (({"method": "rtn", "group_size": 8}, {"method": "gptq", "group_size": 8}), ModelError, "quantized already"),
        (({"method": "rtn", "group_size": 8}, {"method": "rotate"}), ModelError, "quantized already"),
        (({"method": "rotate"}, {"method": "rilq"}), ModelError, "put one, such as rtn, before it"),
        (({"method": "magnitude", "budget": {"parameters": 0.05}},), BudgetError, "budget cannot be met"),
        (({"method": "fisher", "budget": {"parameters": 0.05}},), BudgetError, "budget cannot be met"),
        (({"method": "flap", "budget": {"parameters": 0.05}},), BudgetError, "budget cannot be met"),
    ],
)
def test_steps_that_cannot_follow(steps: tuple[dict[str, Any], ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        check(*steps)
    assert str(caught.value).startswith("step 2 (") == (len(steps) == 2)


def test_steps_that_can_follow() -> None:
    network = check(
        {"method": "rotate"}, {"method": "rtn", "group_size": 8}, {"method": "rilq"}, {"method": "kv-cache"}
    )
    assert len(quantized_layers(network)) == 4 * 7
    assert all(tensor.is_meta for tensor in network.state_dict().values())


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "opt", "qwen3"])
def test_exact_widths_are_those_of_the_run(family: str) -> None:
    steps = recipe({"method": "magnitude", "budget": {"parameters": 0.75}, "ffn_multiple": 4})
    planned, real = BUILDS[family]().to("meta"), Model(BUILDS[family]())
    check_steps(planned, steps)
    steps.steps[0].apply(real, MethodContext())
    assert [part.units for part in anatomy_of(planned).parts] == [part.units for part in real.anatomy.parts]
