"""Every pruning method: meets its budget, respects shape constraints, and is deterministic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import smelt.compression.pruning  # noqa: F401  (puts the methods on the list)
from smelt.compression.base import METHODS, MethodContext
from smelt.errors import BudgetError, RecipeError
from smelt.measure.cost import Workload, block_cost
from smelt.models.load import load
from smelt.models.model import Model
from tests.tiny import BUILDS, DECODER, TRANSFORMERS, build_network, inputs, labeled

SETTINGS: list[dict[str, Any]] = [
    {"method": "random"},
    {"method": "magnitude"},
    {"method": "taylor"},
    {"method": "wanda-sp"},
    {"method": "flap"},
    {"method": "fisher", "repair": "none"},
    {"method": "fisher", "repair": "tune", "solver": "ridge"},
    {"method": "fisher", "repair": "full"},
]
WORKLOAD = Workload(tokens=11, image_size=32)


def run(name: str, settings: dict[str, Any], batches: int = 4, seed: int = 0) -> Model:
    model = Model(BUILDS[name]())
    model.network.config.image_size = 32
    context = MethodContext(batches=[labeled(name, i) for i in range(batches)], seed=seed)
    METHODS.build({"seq_len": 11, **settings}).apply(model, context)
    return model


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
@pytest.mark.parametrize("name", ["bert", "mpnet", "gpt2", "opt", "llama", "qwen3", "vit"])
def test_the_budget_is_met_and_nearly_exhausted(name: str, settings: dict[str, Any]) -> None:
    full = block_cost(Model(BUILDS[name]()).anatomy, "macs", WORKLOAD)
    model = run(name, {**settings, "budget": {"macs": 0.7}})
    share = block_cost(model.anatomy, "macs", WORKLOAD) / full
    assert 0.55 < share <= 0.7
    with torch.no_grad():
        assert torch.isfinite(model.network(**inputs(name)).logits).all()


@pytest.mark.parametrize("method", ["random", "magnitude", "taylor", "wanda-sp", "fisher"])
@pytest.mark.parametrize("name", ["resnet", "resnet-bottleneck"])
@pytest.mark.parametrize("measure", ["parameters", "macs"])
def test_channels_of_convolutions(name: str, method: str, measure: Any) -> None:
    full = block_cost(Model(BUILDS[name]()).anatomy, measure, WORKLOAD)
    model = run(name, {"method": method, "repair": "none", "budget": {measure: 0.7}})
    assert 0.5 < block_cost(model.anatomy, measure, WORKLOAD) / full <= 0.7
    with torch.no_grad():
        assert torch.isfinite(model.network(**inputs(name)).logits).all()


@pytest.mark.parametrize("measure", ["parameters", "bytes"])
def test_other_budget_metrics(measure: Any) -> None:
    full = block_cost(Model(BUILDS["llama"]()).anatomy, measure, Workload())
    model = run("llama", {"method": "fisher", "budget": {measure: 0.75}})
    assert 0.6 < block_cost(model.anatomy, measure, Workload()) / full <= 0.75


def test_latency_is_measured_and_met() -> None:
    model = run("bert", {"method": "fisher", "budget": {"latency": 0.8}, "repair": "none"})
    assert sum(part.units for part in model.anatomy.parts) < sum(p.units for p in Model(BUILDS["bert"]()).anatomy.parts)


def test_the_search_keeps_widths_at_multiples() -> None:
    model = run("bert", {"method": "fisher", "budget": {"macs": 0.6}, "ffn_multiple": 8, "head_multiple": 2})
    parts = model.anatomy.parts
    assert all(part.units % (2 if part.kind == "heads" else 8) == 0 for part in parts)


def wide_llama(**more: Any) -> Model:
    sizes = {"intermediate_size": 1040, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 8}
    return Model(build_network(hf.LlamaForCausalLM, hf.LlamaConfig(**{**DECODER, **sizes, **more})))


@pytest.mark.parametrize(("device", "channels", "heads"), [("cpu", 32, 4), ("cuda:0", 128, 1)])
@pytest.mark.parametrize("method", ["magnitude", "wanda-sp", "flap", "fisher"])
def test_widths_suit_the_device_by_default(method: str, device: str, channels: int, heads: int) -> None:
    """128 columns are 16 of these heads: too few would be left to choose from."""
    model, context = wide_llama(), MethodContext(batches=[labeled("llama", i) for i in range(4)])
    step = METHODS.build({"method": method, "seq_len": 11, "repair": "none", "budget": {"parameters": 0.7}})
    chosen = step.for_device(device)
    assert chosen.to_json()["alignment"] == channels and chosen.for_device("cpu") == chosen
    chosen.apply(model, context)
    pruned = [part for part in model.anatomy.parts if part.units < part.original_units]
    for part in pruned:
        assert part.units % (heads if part.kind == "heads" else channels) == 0
    assert any(part.kind == "ffn_channels" for part in pruned)


def test_given_multiples_and_narrow_parts_are_not_aligned() -> None:
    settings = {"method": "random", "seq_len": 11, "budget": {"parameters": 0.7}}
    for model, more in ((wide_llama(), {"ffn_multiple": 1}), (wide_llama(intermediate_size=250), {})):
        METHODS.build({**settings, **more}).apply(model, MethodContext())
        assert any(part.units % 32 for part in model.anatomy.parts if part.kind != "heads")


def test_a_decoder_keeps_its_outer_layers_and_half_of_every_layer() -> None:
    model = run("llama", {"method": "fisher", "budget": {"parameters": 0.6}})
    assert all(part.units >= part.original_units / 2 for part in model.anatomy.parts)
    model = run("llama", {"method": "fisher", "budget": {"parameters": 0.3}, "max_sparsity": 1.0})
    assert all(part.units >= 1 for part in model.anatomy.parts if part.block in (0, 1, 2))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_the_same_seed_is_bit_identical(settings: dict[str, Any]) -> None:
    one, two = (run("llama", {**settings, "budget": {"parameters": 0.8}}).network.state_dict() for _ in range(2))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_published_does_not_prune_the_first_attention() -> None:
    settings = {"method": "fisher", "budget": {"macs": 0.8}, "teacher": "assistant"}
    plain = run("bert", {**settings, "repair": "none"})
    tuned = run("bert", {**settings, "repair": "tune", "published": True})
    before, after = (model.anatomy.parts for model in (plain, tuned))
    assert [p.kept for p in before] == [p.kept for p in after]
    assert torch.equal(before[0].output.weight, after[0].output.weight)
    assert not torch.equal(before[1].output.weight, after[1].output.weight)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_weights_stay_trainable_and_hooks_are_removed(name: str) -> None:
    model = run(name, {"method": "fisher", "budget": {"macs": 0.8}})
    assert all(parameter.requires_grad for parameter in model.network.parameters())
    own = {"_PlaneSlicer"}
    for module in model.network.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        assert all(type(hook).__name__ in own for hook in hooks)
        assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "fisher", "budget": {"macs": 0}}, "above 0"),
        ({"method": "fisher", "budget": {"macs": 1.5}}, "at most 1"),
        ({"method": "fisher", "budget": {"macs": float("nan")}}, "above 0"),
        ({"method": "fisher", "budget": {"energy": 0.5}}, "limits one of"),
        ({"method": "fisher", "budget": {"macs": 0.5}, "repair": "magic"}, "must be one of"),
        ({"method": "fisher", "budget": {"macs": 0.5}, "max_sparsity": 2.0}, "between"),
        ({"method": "fisher", "budget": {"macs": 0.5}, "ffn_multiple": "8"}, "must be an integer"),
        ({"method": "fisher", "budget": {"macs": 0.5}, "rearranged": 1}, "must be true or false"),
        ({"method": "fisher"}, "needs `budget`"),
        ({"method": "flap", "budget": {"macs": 0.5}, "repair": "magic"}, "must be one of"),
        ({"method": "random", "budget": {"latency": 0.5}}, "latency"),
        ({"method": "sharks", "budget": {"macs": 0.5}}, "there is no method"),
        ({"method": "fisher", "budget": {"macs": 0.5}, "lazers": 3}, "no parameter"),
    ],
)
def test_invalid_settings_raise_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        METHODS.build(settings)
    assert "\n" not in str(caught.value)


def test_a_budget_below_the_minimum_is_refused() -> None:
    with pytest.raises(BudgetError, match="cannot be met"):
        run("llama", {"method": "fisher", "budget": {"parameters": 0.05}})


@pytest.mark.parametrize(
    ("settings", "hint"), [({"repair": "tune"}, "use repair: full"), ({"teacher": "assistant"}, "use teacher: dense")]
)
def test_repairs_that_do_not_support_convolutions_are_refused(settings: dict[str, Any], hint: str) -> None:
    with pytest.raises(RecipeError, match=hint):
        run("resnet", {"method": "fisher", **settings, "budget": {"macs": 0.7}})


def test_all_methods_are_registered_with_their_papers() -> None:
    assert set(METHODS) >= {"random", "magnitude", "wanda-sp", "flap", "taylor", "fisher"}
    assert all(cls.paper and cls.summary.endswith(".") for cls in METHODS.values())


@pytest.mark.shared
def test_ordering_on_a_real_language_model(shared: Path) -> None:
    """stories260K at 80%: perplexity of full reconstruction < search alone < random (mean of 3 seeds)."""
    from smelt.data.batches import text_batches
    from smelt.data.text import TextData
    from smelt.measure.perplexity import perplexity

    folder = shared / "weights" / "stories260K"
    base = load(folder)
    torch.manual_seed(0)
    start = base.tokenizer("Once upon a time", return_tensors="pt")["input_ids"].repeat(24, 1)
    stories = base.network.generate(start, max_new_tokens=200, do_sample=True, pad_token_id=0)
    texts = [base.tokenizer.decode(story, skip_special_tokens=True) for story in stories]
    calibration, evaluation = TextData("stories", tuple(texts[:16])), TextData("more", tuple(texts[16:]))
    perplexities: dict[str, list[float]] = {"random": [], "search": [], "full": []}
    for seed in range(3):
        batches = text_batches(calibration, base.tokenizer, samples=24, length=96, batch_size=4, seed=seed)
        for name, settings in {
            "random": {"method": "random"},
            "search": {"method": "fisher", "repair": "none", "rearranged": False},
            "full": {"method": "fisher"},
        }.items():
            model = load(folder)
            METHODS.build({**settings, "budget": {"parameters": 0.8}}).apply(
                model, MethodContext(batches=batches, seed=seed)
            )
            perplexities[name].append(perplexity(model, evaluation, context=96).value)
    means = {name: float(np.mean(values)) for name, values in perplexities.items()}
    assert means["full"] < means["search"] < means["random"], means
