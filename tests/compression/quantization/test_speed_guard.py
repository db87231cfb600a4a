"""`guard: speed`: slower layers get another format or keep their weights, whatever the method; decisions are resumed
and repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smelt.compression.base import METHODS, Choices, MethodContext, SpeedGuard
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization.speed_guard import CHOICE
from smelt.errors import RecipeError
from smelt.models.model import Model
from smelt.models.quantization_scheme import LinearGroupSpec
from smelt.models.quantized import quantized_layers
from smelt.numerics.catalog import format_name
from tests.compression.quantization.test_base import InterruptedRunError, InterruptingProgress, batches, same
from tests.mixtures import CHOSEN, EXPERTS, loaded
from tests.mixtures import batches as mixture_batches
from tests.tiny import BUILDS, inputs

SMALL = {"bits": 4, "group_size": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "rtn": SMALL, "gptq": SMALL, "hqq": SMALL, "awq": SMALL, "smoothquant": {}, "aqas": {}, "mixed": {"group_size": 16},
    "omniquant": {**SMALL, "epochs": 1}, "flexround": {**SMALL, "iterations": 2}, "quarot": {},
}  # fmt: skip


def guard(time_ratio: Callable[[LinearGroupSpec], float], *formats: str) -> SpeedGuard:
    return SpeedGuard(time_ratio, "a device", "chat", formats)


def slow_down_projection(spec: LinearGroupSpec) -> float:
    return 1.5 if spec.in_features == 48 else 0.5


def slow_unless_eight_bits(spec: LinearGroupSpec) -> float:
    """Down projections are fast in 8-bit integers only."""
    return 1.5 if spec.in_features == 48 and format_name(spec.scheme.weight) != "int8" else 0.5


def apply(settings: dict[str, Any], time_ratio: Callable[[LinearGroupSpec], float], **context: Any) -> Any:
    model = Model(BUILDS["llama"]())
    context = {"batches": batches("llama"), "speed_guard": guard(time_ratio), **context}
    return model, METHODS.build(settings).apply(model, MethodContext(**context))


def weights_of(model: Model, name: str) -> list[torch.Tensor]:
    return [module.weight for path, module in model.network.named_modules() if path.endswith(name)]


@pytest.mark.parametrize("method", list(SETTINGS))
def test_slower_layers_stay_unquantized_with_every_method(method: str) -> None:
    model, facts = apply({"method": method, **SETTINGS[method]}, slow_down_projection)
    quantized = quantized_layers(model.network)
    assert facts.get("layers_rotating_their_inputs", 3) == 3  # of quarot: the attention outputs
    assert len(quantized) == facts["layers_quantized"] == 3 * 6
    assert not any(path.endswith("down_proj") for path in quantized)
    assert facts["speed_guard"]["unquantized"] == [f"model.layers.{block}.mlp.down_proj" for block in range(3)]
    if method != "quarot":  # which rotates all layers, with the same function
        for found, original in zip(
            weights_of(model, "down_proj"), weights_of(Model(BUILDS["llama"]()), "down_proj"), strict=True
        ):
            assert torch.equal(found, original)


def test_a_rotated_network_computes_the_same_with_unquantized_layers() -> None:
    settings = {"method": "quarot", "bits": 8, "input_activations": None, "rounding": "rtn"}
    model, _ = apply(settings, slow_down_projection)
    original, batch = BUILDS["llama"](), inputs("llama")
    with torch.no_grad():
        found, expected = model.network(**batch).logits, original(**batch).logits
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("method", list(SETTINGS))
def test_slower_layers_get_the_next_format_that_is_not_slower(method: str) -> None:
    fallback = guard(slow_unless_eight_bits, "fp8-e4m3", "int8", "nf4")
    model, facts = apply({"method": method, **SETTINGS[method]}, slow_unless_eight_bits, speed_guard=fallback)
    if method in ("smoothquant", "mixed"):  # in which the layers, or some of them, have 8 bits without it
        assert set(facts["speed_guard"]["formats"].values()) <= {"int8"}
        assert not facts["speed_guard"]["unquantized"]
        return
    quantized = quantized_layers(model.network)
    down = [f"model.layers.{block}.mlp.down_proj" for block in range(3)]
    assert len(quantized) == facts["layers_quantized"] == 3 * 7
    names = {path: format_name(layer.scheme.weight) for path, layer in quantized.items()}
    assert {names[path] for path in down} == {"int8"} and "int8" not in {names[p] for p in names if p not in down}
    assert {quantized[path].scheme.inputs for path in down} == {METHODS.build({"method": method}).scheme.inputs}
    for path in down:
        assert facts["layers"][path]["scheme"]["weight"] == "int8" and facts["layers"][path]["relative_error"] < 1e-3
    result = facts["speed_guard"]
    assert result["formats"] == dict.fromkeys(down, "int8") and result["unquantized"] == []
    assert list(result["layers"]) == down
    assert list(result["layers"][down[0]]["time_ratios"].items())[1:] == [("fp8-e4m3", 1.5), ("int8", 0.5)]
    assert result["layers"][down[0]]["became"] == "int8"
    assert torch.isfinite(model.network(**inputs("llama")).logits).all()


def test_the_method_quantizes_with_the_other_format_too() -> None:
    """With data, GPTQ has a smaller error at the outputs than rounding to nearest in the same format."""
    fallback = guard(lambda spec: 2.0 if spec.scheme.weight.bits == 4 else 0.5, "int3/16")
    models = {
        method: apply({"method": method, **SMALL}, fallback.time_ratio, speed_guard=fallback)[0]
        for method in ("gptq", "rtn", "hqq")
    }
    paths = quantized_layers(models["gptq"].network)
    weights = {m: [quantized_layers(model.network)[path].weight for path in paths] for m, model in models.items()}
    assert all(torch.equal(a, b) for a, b in zip(weights["rtn"], weights["hqq"], strict=True))  # hqq: to nearest
    assert not any(torch.equal(a, b) for a, b in zip(weights["rtn"], weights["gptq"], strict=True))
    direct = Model(BUILDS["llama"]())
    METHODS.build({"method": "gptq", "format": "int3/16"}).apply(direct, MethodContext(batches=batches("llama")))
    assert same(models["gptq"], direct)  # as if the recipe had named the format


@pytest.mark.parametrize("method", ["awq", "aqas"])
def test_scales_are_searched_in_the_format_that_a_layer_gets(method: str) -> None:
    fallback = guard(lambda spec: 2.0 if spec.scheme.weight.bits == 4 else 0.5, "int3/16")
    model, facts = apply({"method": method, **SETTINGS[method]}, fallback.time_ratio, speed_guard=fallback)
    direct = Model(BUILDS["llama"]())
    context = MethodContext(batches=batches("llama"))
    expected = METHODS.build({"method": method, "format": "int3/16"}).apply(direct, context)
    assert same(model, direct)
    assert {p: f["scaling"] for p, f in facts["layers"].items()} == {
        p: f["scaling"] for p, f in expected["layers"].items()
    }


def test_what_is_said_about_other_formats() -> None:
    """What takes another format and what stays; a format whose groups do not divide the inputs is not timed."""
    timed: list[tuple[int, str]] = []

    def time_ratio(spec: LinearGroupSpec) -> float:
        name = format_name(spec.scheme.weight)
        timed.append((spec.in_features, name))
        return {(48, "int8"): 1.01, (32, "int4-asym/16@float16"): 0.9}.get((spec.in_features, name), 1.25)

    fallback = guard(time_ratio, "int4/32", "int8")
    model, facts = apply({"method": "rtn", **SMALL}, time_ratio, speed_guard=fallback)
    assert [entry for entry in timed if entry[0] == 48] == [(48, "int4-asym/16@float16"), (48, "int8")]
    result, numbers = facts["speed_guard"], 3 * 48 * 32
    assert result["sentence"] == (
        "guard: 3 of 21 layers become int8, because they would be slower on a device for the workload chat: "
        "mlp.down_proj (int8: 1.01x instead of 1.25x the time); this takes 1.82 kB more"
    )
    scale_bits = quantized_layers(model.network)["model.layers.0.mlp.down_proj"].scheme.weight.bits_per_value(48, 32)
    assert result["extra_bytes"] == round(numbers * (scale_bits - 4 - 24 / 16) / 8)
    both = guard(lambda spec: slow_unless_eight_bits(spec) if spec.in_features == 48 else 1.25, "int8")
    _, facts = apply({"method": "rtn", **SMALL}, both.time_ratio, speed_guard=both)
    assert "3 of 21 layers become int8 and 18 of 21 layers stay unquantized" in facts["speed_guard"]["sentence"]
    assert "choose another format" not in facts["speed_guard"]["sentence"]


@pytest.mark.parametrize(("ratio", "stays"), [(1.0, False), (1.02, False), (1.021, True)])
def test_two_percent_are_tolerated(ratio: float, stays: bool) -> None:
    model, facts = apply({"method": "rtn", **SMALL}, lambda spec: ratio)
    assert bool(quantized_layers(model.network)) is not stays
    if stays:
        assert same(model, Model(BUILDS["llama"]()))
        assert "all 21 layers stay unquantized" in facts["speed_guard"]["sentence"]
        assert "choose another format" in facts["speed_guard"]["sentence"]
    else:
        assert facts["speed_guard"]["extra_bytes"] == 0 and "none of the 21" in facts["speed_guard"]["sentence"]


def test_what_is_timed_and_what_is_said() -> None:
    """Equal layers are timed once, layers with a shared input together; the sentence says what it costs."""
    timed: list[LinearGroupSpec] = []

    def time_ratio(spec: LinearGroupSpec) -> float:
        timed.append(spec)
        return {(32, (32, 16, 16)): 1.25, (48, (32,)): 1.3}.get((spec.in_features, spec.out_features), 0.9)

    _, facts = apply({"method": "rtn", **SMALL}, time_ratio)
    assert [(spec.in_features, spec.out_features) for spec in timed] == [
        (32, (32, 16, 16)), (32, (32,)), (32, (48, 48)), (48, (32,)),
    ]  # fmt: skip
    assert [spec.fused_input for spec in timed] == [True, False, True, True]
    assert {format_name(spec.scheme.weight) for spec in timed} == {"int4-asym/16@float16"}
    assert not any(spec.bias for spec in timed) and {spec.token_share for spec in timed} == {1.0}
    result = facts["speed_guard"]
    bytes_saved = 3 * (32 * 64 + 48 * 32) * (4 - (4 + 24 / 16) / 8)
    assert result["extra_bytes"] == bytes_saved
    assert result["sentence"] == (
        "guard: 12 of 21 layers stay unquantized, because they would be slower on a device for the workload chat: "
        "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj (1.25x the time); mlp.down_proj (1.30x the time); "
        "this takes 35.6 kB more"
    )


def test_formats_chosen_by_a_search_are_those_timed() -> None:
    timed: list[LinearGroupSpec] = []

    def time_ratio(spec: LinearGroupSpec) -> float:
        timed.append(spec)
        return 0.5

    model, _ = apply({"method": "mixed", "bits": 4.5, "group_size": 16}, time_ratio)
    assert {spec.scheme for spec in timed} == {layer.scheme for layer in quantized_layers(model.network).values()}


def test_an_expert_is_timed_with_its_share_of_the_tokens(tmp_path: Path) -> None:
    timed: list[LinearGroupSpec] = []

    def time_ratio(spec: LinearGroupSpec) -> float:
        timed.append(spec)
        return 2.0 if spec.token_share < 1 else 0.5

    model = loaded("mixtral", tmp_path)
    context = MethodContext(batches=mixture_batches(), speed_guard=guard(time_ratio))
    METHODS.build({"method": "gptq", "group_size": 16}).apply(model, context)
    assert {spec.token_share for spec in timed} == {1.0, CHOSEN / EXPERTS}
    assert all("experts" not in path for path in quantized_layers(model.network))


def test_static_scales_are_set_for_quantized_experts_only(tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path, starved=True)
    slow_inputs = guard(lambda spec: 2.0 if len(spec.out_features) == 2 and spec.token_share < 1 else 0.5)
    settings = {"method": "rtn", "bits": 8, "group_size": 16, "input_activations": "int8", "static_activations": True}
    METHODS.build(settings).apply(model, MethodContext(batches=mixture_batches(), speed_guard=slow_inputs))
    experts = {path.rpartition(".")[2] for path in quantized_layers(model.network) if ".experts." in path}
    assert len(experts) == 1  # only the output projections
    assert torch.isfinite(model.network(**mixture_batches()[0]).logits).all()


class InterruptedBlocks(InterruptingProgress):
    """Stop the run when a block is about to start, not when layers are timed."""

    def __init__(self, after: int, method: str) -> None:
        super().__init__(after)
        self.method = method

    def track(self, items: Any, description: str) -> Any:
        return super().track(items, description) if description == self.method else items


@pytest.mark.parametrize("method", ["gptq", "awq", "flexround"])
def test_a_resumed_step_keeps_the_decision(method: str, tmp_path: Path) -> None:
    def refuse(spec: LinearGroupSpec) -> float:
        raise AssertionError("measured again")

    settings = {"method": method, **SETTINGS[method]}
    uninterrupted, _ = apply(settings, slow_down_projection)
    checkpoint, progress = Checkpoint(tmp_path), InterruptedBlocks(2, method)
    with pytest.raises(InterruptedRunError):
        apply(settings, slow_down_projection, checkpoint=checkpoint, progress=progress)
    assert (tmp_path / f"{CHOICE}.json").exists()
    resumed, _ = apply(settings, refuse, checkpoint=checkpoint)
    assert same(uninterrupted, resumed)


def test_a_repeated_run_takes_the_recorded_decision() -> None:
    choices = Choices()
    fallback = guard(slow_unless_eight_bits, "int8")
    first, facts = apply({"method": "gptq", **SMALL}, slow_unless_eight_bits, choices=choices, speed_guard=fallback)
    assert facts["speed_guard"]["formats"]
    repeated, slow = Choices(choices.made), guard(lambda spec: 2.0, "int8")
    second, repeated_facts = apply({"method": "gptq", **SMALL}, slow.time_ratio, choices=repeated, speed_guard=slow)
    assert same(first, second) and repeated.made == choices.made and repeated_facts == facts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": 1}, "damaged"),
        ({"time_ratios": None}, "damaged"),
        ({"time_ratios": {}}, "does not fit"),
        ({"unquantized": "mlp"}, "does not fit"),
        ({"unquantized": ["model.layers.9.mlp.down_proj"]}, "does not fit"),
        ({"unquantized": [["a"]]}, "does not fit"),
        ({"unquantized": ["model.layers.0.mlp.up_proj"]}, "separates layers"),
        ({"formats": []}, "damaged"),
        ({"formats": {"model.layers.0.mlp.down_proj": "int8"}}, "does not fit"),  # it stays unquantized, too
        ({"formats": {"model.layers.9.mlp.down_proj": "int8"}}, "does not fit"),
        ({"formats": {"model.layers.0.mlp.up_proj": "int8"}}, "separates layers"),
        ({"other_ratios": {"model.layers.0.mlp.down_proj": {"nf4": 0.5}}}, "does not name"),
        ({"formats": {"model.layers.0.self_attn.o_proj": "int8"}}, "not timed"),
        ({"other_ratios": {"model.layers.0.mlp.down_proj": {"int8": "1"}}}, "must be numbers"),
        ([], "damaged"),
    ],
)
def test_a_recorded_decision_is_checked(change: Any, message: str) -> None:
    choices, fallback = Choices(), guard(slow_down_projection, "int8")
    apply({"method": "rtn", **SMALL}, slow_down_projection, choices=choices, speed_guard=fallback)
    recorded = {**choices.made[CHOICE], **change} if isinstance(change, dict) else change
    with pytest.raises(RecipeError, match=message):
        apply(
            {"method": "rtn", **SMALL}, slow_down_projection, choices=Choices({CHOICE: recorded}), speed_guard=fallback
        )
