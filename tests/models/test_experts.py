"""Mixtures of experts: unfused experts compute the same, round-trip bit for bit, and can be pruned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import smelt.compression.pruning  # noqa: F401  (puts the methods on the list)
from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.masks import masked, unit_masks
from smelt.errors import ConfigError, ModelError
from smelt.measure.cost import Workload, active_parameters, block_cost, block_parameters, unit_bytes, unit_macs
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.experts import SeparateExperts
from smelt.models.load import load, skeleton
from smelt.models.surgery import keep_units
from tests.mixtures import BUILDS, CHOSEN, EXPERTS, HIDDEN, INNER, PLAIN, batches, fused, ids, loaded, saved


@torch.no_grad()
def logits(network: Any, **settings: Any) -> Tensor:
    logits: Tensor = network(**ids(**settings)).logits
    return logits


def labeled() -> list[dict[str, Tensor]]:
    return [{**batch, "labels": batch["input_ids"]} for batch in batches(padded=True)]


@pytest.mark.parametrize("name", BUILDS)
def test_unfused_experts_compute_the_same(name: str, tmp_path: Path) -> None:
    network, folder = saved(name, tmp_path)
    model = load(folder)
    torch.testing.assert_close(logits(model.network, padded=True), logits(network, padded=True), atol=2e-6, rtol=0)
    counted = sum(p.numel() for p in model.network.parameters())
    assert counted == sum(p.numel() for p in network.parameters())
    assert not any("gate_up_proj" in path for path in model.network.state_dict())


@torch.no_grad()
def test_a_mixture_by_hand(tmp_path: Path) -> None:
    """Compute token by token: the selected experts' outputs times their routing weights."""
    experts = loaded("qwen3-moe", tmp_path).network.model.layers[0].mlp.experts
    x, index = torch.randn(7, HIDDEN), torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(7)])
    weights = torch.rand(7, CHOSEN)
    by_hand = [sum(w * experts[int(e)](row[None])[0] for e, w in zip(*pair, strict=True))
               for row, *pair in zip(x, index, weights, strict=True)]  # fmt: skip
    torch.testing.assert_close(experts(x, index, weights), torch.stack(by_hand), atol=1e-6, rtol=0)
    assert experts(x[:0], index[:0], weights[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("name", PLAIN)
def test_each_expert_is_a_part(name: str, tmp_path: Path) -> None:
    anatomy = loaded(name, tmp_path).anatomy
    assert [part.kind for part in anatomy.blocks[0].parts] == ["heads"] + ["ffn_channels"] * EXPERTS
    part = anatomy.blocks[1].parts[4]
    assert (part.path, part.units, part.output.out_features) == ("model.layers.1.mlp.experts.3", INNER, HIDDEN)
    assert all(
        isinstance(writer.module, torch.nn.Linear) and writer.out_features == INNER for writer in part.input_projections
    )
    assert part.mixture is not None and (part.mixture.num_experts, part.mixture.top_k) == (EXPERTS, CHOSEN)
    (_, first), (_, second) = anatomy.blocks[0].norm_consumers
    assert len(first) == 3 and len(second) == 1 + 2 * EXPERTS  # the router and the input projections of all experts


def test_blocks_without_experts_are_unchanged(tmp_path: Path) -> None:
    first, second = loaded("qwen3-moe-dense-first", tmp_path).anatomy.blocks
    assert [part.path for part in first.parts] == ["model.layers.0.self_attn", "model.layers.0.mlp"]
    assert [part.units for part in second.parts[1:]] == [INNER] * EXPERTS and first.parts[1].units == 80


def test_fused_experts_are_reported() -> None:
    with pytest.raises(ModelError, match="are fused; load the model with Smelt"):
        anatomy_of(fused("mixtral"))


@pytest.mark.parametrize("name", BUILDS)
def test_save_and_load_is_bit_identical_and_loads_in_transformers(name: str, tmp_path: Path) -> None:
    model = loaded(name, tmp_path / "source")
    (tmp_path / "out").mkdir()
    save_artifact(model, tmp_path / "out")
    reloaded = load_artifact(tmp_path / "out")
    one, two = model.network.state_dict(), reloaded.network.state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert torch.equal(logits(reloaded.network), logits(model.network))
    reference = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(reference), logits(model.network), atol=2e-6, rtol=0)


def test_generation_with_a_cache_equals_generation_without(tmp_path: Path) -> None:
    network = loaded("mixtral", tmp_path).network
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompt = ids(batch=2, length=5)
    cached = network.generate(**prompt, use_cache=True, **settings)
    assert torch.equal(cached, network.generate(**prompt, use_cache=False, **settings))


@pytest.mark.parametrize("name", PLAIN)
@torch.no_grad()
def test_pruned_experts_have_individual_widths_and_are_saved(name: str, tmp_path: Path) -> None:
    model = loaded(name, tmp_path / "source")
    kept = [range(part.units) if part.fixed else range(1, part.units, 1 + i % 3)
            for i, part in enumerate(model.anatomy.parts)]  # fmt: skip
    masks = unit_masks(model.anatomy)
    for mask, keep in zip(masks, kept, strict=True):
        mask[[i for i in range(len(mask)) if i not in keep]] = 0
    with masked(model.anatomy, masks):
        expected = logits(model.network)
    for position, keep in enumerate(kept):
        keep_units(model.network, model.anatomy.parts[position], list(keep))
    torch.testing.assert_close(logits(model.network), expected, atol=2e-6, rtol=0)
    (tmp_path / "out").mkdir()
    save_artifact(model, tmp_path / "out")
    reloaded = load_artifact(tmp_path / "out")
    assert reloaded.anatomy.shape() == model.anatomy.shape()
    assert len({part.units for part in reloaded.anatomy.parts if part.mixture}) > 1
    assert torch.equal(logits(reloaded.network), logits(model.network))
    widths = json.loads((tmp_path / "out" / "config.json").read_text())["per_layer_config"]["1"].values()
    assert any(isinstance(width, list) for width in widths)  # which transformers refuses, as it must


@pytest.mark.parametrize("method", ["magnitude", "taylor", "wanda-sp", "flap", "fisher", "random"])
def test_pruning_methods_support_mixtures(method: str, tmp_path: Path) -> None:
    model = loaded("olmoe", tmp_path, starved=True)
    settings = {"method": method, "budget": {"parameters": 0.8}, **({"repair": "none"} if method == "fisher" else {})}
    facts = METHODS.build(settings).apply(model, MethodContext(batches=labeled()))
    assert facts["parameters_removed"] > 0
    assert all(part.units == 2 for part in model.anatomy.parts if part.fixed)  # normalized together, so they stay
    assert bool(logits(model.network).isfinite().all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"repair": "full"}, "for a mixture of experts use repair: none"), ({"repair": "tune"}, "for a mixture of")],
)
def test_repairs_of_mixtures_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path)
    with pytest.raises(ConfigError, match=message):
        METHODS.build({"method": "magnitude", "budget": {"macs": 0.8}, **changes}).apply(
            model, MethodContext(batches=batches())
        )


def test_a_latency_budget_is_refused(tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path)
    with pytest.raises(ConfigError, match="for a mixture of experts use macs"):
        METHODS.build({"method": "fisher", "budget": {"latency": 0.8}, "repair": "none"}).apply(
            model, MethodContext(batches=labeled())
        )


def test_jointly_normalized_heads_cannot_be_removed(tmp_path: Path) -> None:
    model = loaded("olmoe", tmp_path)
    with pytest.raises(ModelError, match="none of them can be removed"):
        keep_units(model.network, model.anatomy.parts[0], [0])


def test_only_the_selected_experts_count_as_macs(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)[1]
    anatomy, workload = anatomy_of(skeleton(folder)), Workload(tokens=10)
    expert = anatomy.parts[1]
    assert unit_macs(expert, workload, causal=True) == 10 * 3 * HIDDEN * CHOSEN / EXPERTS
    assert unit_bytes(expert, workload) == 4 * 3 * HIDDEN * CHOSEN / EXPERTS
    attention = 10 * (2 * 64 * 64 + 2 * 32 * 64) + 2 * 64 * 100 / 2
    assert block_cost(anatomy, "macs", workload) == 2 * (attention + 10 * CHOSEN * 3 * HIDDEN * INNER)
    idle = 2 * (EXPERTS - CHOSEN) * 3 * HIDDEN * INNER
    assert active_parameters(anatomy) == block_parameters(anatomy) - idle
    assert any(isinstance(module, SeparateExperts) for module in anatomy.network.modules())
