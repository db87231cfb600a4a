"""Mixed precision: the integer program against brute force, the budget, and bits where errors are large."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.quantization.mixed import assign_bit_widths
from smelt.errors import BudgetError, RecipeError
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from tests.tiny import BUILDS, inputs


def batches() -> list[dict[str, torch.Tensor]]:
    return [inputs("llama", seed=seed) for seed in range(3)]


def run(settings: dict[str, Any], model: Model | None = None) -> tuple[Model, dict[str, Any]]:
    model = model or Model(BUILDS["llama"]())
    facts = METHODS.build({"method": "mixed", "group_size": 16, **settings}).apply(
        model, MethodContext(batches=batches())
    )
    return model, facts


def widths(model: Model) -> dict[str, int]:
    return {path: layer.scheme.weight.bits for path, layer in quantized_layers(model.network).items()}


@pytest.mark.parametrize("seed", range(12))
def test_the_integer_program_matches_brute_force(seed: int) -> None:
    generator = np.random.default_rng(seed)
    groups, choices = 5, 4
    errors = np.sort(generator.exponential(1e-9, (groups, choices)), axis=1)[:, ::-1]  # as small as possible
    if seed % 3 == 0:
        errors = generator.permuted(errors, axis=1)  # more bits need not mean less error
    costs = generator.integers(1, 20, (groups, 1)) * np.array([2.5, 3.5, 4.5, 8.5])
    budget = float(costs[:, 0].sum() + generator.uniform(0, 1) * (costs[:, -1] - costs[:, 0]).sum())
    rows = np.arange(groups)
    possible = [c for c in itertools.product(range(choices), repeat=groups) if costs[rows, c].sum() <= budget]
    best = min(errors[rows, c].sum() for c in possible)
    result = assign_bit_widths(errors, costs, budget)
    assert costs[rows, result].sum() <= budget * (1 + 1e-9)
    assert errors[rows, result].sum() == pytest.approx(best, rel=1e-6)


def test_a_budget_that_is_met_exactly() -> None:
    errors, costs = np.array([[2.0, 1.0]] * 3), np.array([[3.3, 4.4]] * 3)
    assert assign_bit_widths(errors, costs, 3 * 4.4) == [1, 1, 1]
    assert assign_bit_widths(errors, costs, 3 * 3.3) == [0, 0, 0]


def test_no_errors_at_all() -> None:
    assert len(assign_bit_widths(np.zeros((2, 2)), np.ones((2, 2)), 2.0)) == 2


@pytest.mark.parametrize("bits", [4.0, 5.0, 6.5, 9.5])
@pytest.mark.parametrize("rounding", ["rtn", "gptq"])
def test_the_average_bit_width_is_met_and_nearly_exhausted(bits: float, rounding: str) -> None:
    """Scales count: 16 weights share 24 bits of scale and zero point."""
    model, facts = run({"bits": bits, "rounding": rounding, "search_tokens": 40})
    assert facts["bits_per_weight"] <= bits + 1e-9
    assert facts["bits_per_weight"] > bits - 0.3
    assert set(widths(model).values()) <= {2, 3, 4, 8}
    if bits == 9.5:
        assert set(widths(model).values()) == {8}


def test_layers_that_share_an_input_share_a_bit_width() -> None:
    model, _ = run({"bits": 5.0, "search_tokens": 40})
    result = widths(model)
    for index in range(3):
        attention = f"model.layers.{index}.self_attn"
        assert len({result[f"{attention}.{name}_proj"] for name in "qkv"}) == 1


def test_bits_go_where_errors_are_large() -> None:
    """A block whose feed-forward output is thirty times as large needs more bits."""
    model = Model(BUILDS["llama"]())
    with torch.no_grad():
        model.network.model.layers[1].mlp.down_proj.weight.mul_(30)
    model, facts = run({"bits": 4.5, "search_tokens": 40}, model)
    result = widths(model)
    assert result["model.layers.1.mlp.down_proj"] > max(result[f"model.layers.{i}.mlp.down_proj"] for i in (0, 2))
    errors = facts["layers"]["model.layers.1.mlp.down_proj"]["block_error"]
    assert list(errors) == ["2", "3", "4", "8"] and errors["2"] > errors["4"] > errors["8"] > 0


@torch.no_grad()
def test_the_error_is_of_the_block_output() -> None:
    """Error of one group alone, relative to the block's output, by a plain forward of the network."""
    _, facts = run({"bits": 9.5})
    path = "model.layers.1.mlp.down_proj"
    number_format = METHODS.build({"method": "mixed", "group_size": 16}).formats[0]  # type: ignore[attr-defined]
    states = []
    for rounded in (False, True):
        network = BUILDS["llama"]()
        layer = network.get_submodule(path)
        if rounded:
            layer.weight.copy_(number_format.fake_quantize(layer.weight))
        states.append(torch.stack([network(**b, output_hidden_states=True).hidden_states[2] for b in batches()]))
    expected = float((states[1] - states[0]).square().sum() / states[0].square().sum())
    assert facts["layers"][path]["block_error"]["2"] == pytest.approx(expected, rel=1e-3)


def test_it_beats_a_uniform_bit_width_of_the_same_size() -> None:
    model = Model(BUILDS["llama"]())
    with torch.no_grad():
        for index in (0, 2):
            model.network.model.layers[index].mlp.down_proj.weight.mul_(0.05)
            model.network.model.layers[index].self_attn.o_proj.weight.mul_(0.05)
    state = {key: tensor.clone() for key, tensor in model.network.state_dict().items()}

    def error(settings: dict[str, Any]) -> float:
        other = Model(BUILDS["llama"]())
        other.network.load_state_dict(state)
        with torch.no_grad():
            true = other.network(**inputs("llama")).logits
            facts = METHODS.build({"group_size": 16, **settings}).apply(other, MethodContext(batches=batches()))
            assert facts["bits_per_weight"] <= 4.5 + 1e-9
            return float((other.network(**inputs("llama")).logits - true).square().mean())

    assert error({"method": "mixed", "bits": 4.5, "rounding": "rtn"}) < 0.8 * error({"method": "rtn", "bits": 3})


def test_a_budget_below_the_smallest_bit_width() -> None:
    with pytest.raises(BudgetError, match=r"takes 3\.50 bits per weight") as caught:
        run({"bits": 3.0})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bit_widths": "2,three"}, "with commas"),
        ({"bit_widths": ""}, "with commas"),
        ({"bit_widths": "2,9"}, "2 to 8 bits"),
        ({"format": "nf4"}, "leave format out"),
        ({"rounding": "magic"}, "one of"),
        ({"bits": 40.0}, "between"),
        ({"bits": float("nan")}, "between"),
    ],
)
def test_invalid_settings_raise_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        METHODS.build({"method": "mixed", **settings})
    assert "\n" not in str(caught.value)
