"""Expert pruning: scores against brute force, smaller mixtures against transformers, artifacts, engine, bad input."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.compression.base import CalibrationSize, MethodContext, ResourceEstimate
from smelt.compression.calibration.block_inputs import capture_block_inputs
from smelt.compression.calibration.expert_statistics import ExpertStatistics, observe_experts
from smelt.compression.methods import METHODS
from smelt.compression.pruning.expert_merging import group_experts, merge_experts
from smelt.compression.pruning.expert_pruning import expert_parameters
from smelt.errors import BudgetError, ModelError, RecipeError
from smelt.measure.cost import block_parameters
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.expert_surgery import keep_experts
from smelt.models.experts import split_experts
from smelt.models.load import skeleton
from smelt.models.model import Model
from smelt.models.surgery import keep_units
from smelt.models.verify import verify
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.architectures import DECODERS
from tests.mixtures import BUILDS, CHOSEN, EXPERTS, HIDDEN, INNER, PLAIN, batches, fused, ids, loaded
from tests.serve.test_engine import SMALL, answers, expected, prompts
from tests.tiny import BUILDS as DENSE

METHOD_NAMES = ("reap", "expert-frequency", "expert-merging", "expert-random")
WITH_EXPERTS = {
    architecture.model_type: architecture
    for architecture in DECODERS
    if anatomy_of(split_experts(architecture.build())).mixtures
}


@torch.no_grad()
def logits(network: PreTrainedModel, **settings: Any) -> Tensor:
    result: Tensor = network(**ids(**settings)).logits
    return result


def apply(model: Model, method: str, keep: float, **settings: Any) -> dict[str, Any]:
    step = METHODS.build({"method": method, "budget": {"parameters": keep}, **settings})
    return step.apply(model, MethodContext(batches=batches(padded=True)))


def observed(model: Model) -> list[ExpertStatistics]:
    inputs = capture_block_inputs(model.anatomy, batches(padded=True))
    found = [observe_experts(inputs, block) for block in model.anatomy.blocks]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3-moe-dense-first"])
def test_the_score_of_reap_by_hand(name: str, tmp_path: Path) -> None:
    """The oracle reads what the router of transformers returns, and runs every expert on every token."""
    model = loaded(name, tmp_path)
    statistics = observed(model)
    assert len(statistics) == len(model.anatomy.mixtures)
    for mixture, found in zip(model.anatomy.mixtures, statistics, strict=True):
        calls: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        hook = mixture.router.register_forward_hook(
            lambda _, args, output, calls=calls: calls.append((args[0], output))
        )
        masks = []
        with torch.no_grad():
            for batch in batches(padded=True):
                model.network(**batch)
                masks.append(batch["attention_mask"].flatten().bool())
        hook.remove()
        sums, counts, alike = np.zeros(EXPERTS), np.zeros(EXPERTS), np.zeros((EXPERTS, EXPERTS))
        for (hidden, (router_logits, weights, index)), mask in zip(calls, masks, strict=True):
            hidden = hidden.reshape(-1, hidden.shape[-1])
            for token in torch.arange(len(mask))[mask].tolist():
                for weight, expert in zip(weights[token].tolist(), index[token].tolist(), strict=True):
                    with torch.no_grad():
                        sums[expert] += weight * float(mixture.module[expert](hidden[token]).double().norm())
                    counts[expert] += 1
            real = router_logits[mask].double()
            alike += (real.T @ real).numpy()
        assert counts.sum() == CHOSEN * sum(int(mask.sum()) for mask in masks)
        np.testing.assert_array_equal(found.tokens, counts)
        np.testing.assert_allclose(found.mean_weighted_norms, sums / counts, rtol=1e-5)
        np.testing.assert_allclose(found.logit_products, alike, rtol=1e-9)


def test_the_scores_of_the_methods_are_relative_to_their_layer() -> None:
    """A layer with outputs ten times as large, and one that no token reached: its scores stay zero."""
    tokens, norms = torch.tensor([2.0, 6.0, 0.0, 4.0]).double(), torch.tensor([3.0, 1.0, 0.0, 8.0]).double()
    layers = [ExpertStatistics(tokens, scale * norms, torch.eye(4).double()) for scale in (1, 10)]
    anatomy = anatomy_of(DENSE["llama"]())  # no score depends on it
    means = np.array([3 / 2, 1 / 6, 0, 2])
    for name, relative in (
        ("reap", means / means.mean()),
        ("expert-frequency", np.array([2 / 3, 2, 0, 4 / 3])),
        ("expert-merging", np.array([2 / 3, 2, 0, 4 / 3])),
    ):
        method: Any = METHODS.build({"method": name, "budget": {"parameters": 0.5}})
        for scores in method.scores(anatomy, layers, seed=0):
            np.testing.assert_allclose(scores, relative, rtol=1e-12)
        np.testing.assert_array_equal(method.scores(anatomy, [ExpertStatistics.zeros(4)], seed=0), np.zeros((1, 4)))


def test_random_experts_follow_the_seed(tmp_path: Path) -> None:
    anatomy = loaded("olmoe", tmp_path).anatomy
    method: Any = METHODS.build({"method": "expert-random", "budget": {"parameters": 0.5}})
    first, again, other = (np.stack(method.scores(anatomy, [], seed)) for seed in (1, 1, 0))
    assert first.shape == (2, EXPERTS) and (first == again).all() and (first != other).all()
    assert (first[0] != first[1]).all(), "every layer has its own"


def test_observing_experts_leaves_no_hook(tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path)
    first, second = observed(model), observed(model)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one.tokens, two.tokens) and torch.equal(one.weighted_norms, two.weighted_norms)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.network.modules())


def test_the_similarity_of_experts_is_the_cosine_of_their_router_logits() -> None:
    router_logits = torch.tensor([[3.0, 6.0, 0.0, 0.0], [4.0, 8.0, 1.0, 0.0]]).double()  # [tokens, experts]
    statistics = ExpertStatistics.zeros(4)
    statistics.logit_products += router_logits.T @ router_logits
    expected = [[1, 1, 0.8, 0], [1, 1, 0.8, 0], [0.8, 0.8, 1, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(statistics.similarity, torch.tensor(expected).double())


def test_the_lowest_score_goes_first(tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path)
    scores = [each.mean_weighted_norms.numpy() for each in observed(model)]
    apply(model, "reap", 0.8, experts_per_layer="uniform")
    for mixture, score in zip(model.anatomy.mixtures, scores, strict=True):
        assert mixture.kept == tuple(sorted(np.argsort(score)[-mixture.num_experts :].tolist()))
        assert mixture.num_experts < EXPERTS


@pytest.mark.parametrize("name", WITH_EXPERTS)
@torch.no_grad()
def test_fewer_experts_equal_a_smaller_network_of_transformers(name: str) -> None:
    """The oracle is built with fewer experts and gets the remaining slices of every tensor."""
    network = WITH_EXPERTS[name].build()
    kept = [0, 1, 3]
    config = copy.deepcopy(network.config)
    for field in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if field in config.to_dict():
            setattr(config, field, len(kept))
    reference = type(network)(config).eval()
    state = network.state_dict()
    for key, tensor in reference.state_dict().items():
        for dimension in range(tensor.dim()):
            if tensor.shape[dimension] != state[key].shape[dimension]:
                state[key] = state[key].index_select(dimension, torch.tensor(kept))
    reference.load_state_dict(state)
    pruned = split_experts(copy.deepcopy(network))
    for mixture in anatomy_of(pruned).mixtures:
        keep_experts(pruned, mixture, kept)
    tokens = ids()["input_ids"]
    expected_logits, found = reference(input_ids=tokens).logits, pruned(input_ids=tokens).logits
    torch.testing.assert_close(found, expected_logits, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(found, network(input_ids=tokens).logits, atol=1e-3)


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("counts", ["free", "uniform"])
def test_the_budget_is_met_and_the_artifact_is_the_model(method: str, counts: str, tmp_path: Path) -> None:
    model = loaded("olmoe", tmp_path / "source")
    before = block_parameters(model.anatomy)
    facts = apply(model, method, 0.8, experts_per_layer=counts)
    numbers = [mixture.num_experts for mixture in model.anatomy.mixtures]
    assert block_parameters(model.anatomy) == before - facts["parameters_removed"] <= 0.8 * before
    assert len(set(numbers)) == 1 or counts == "free"
    (tmp_path / "out").mkdir()
    save_artifact(model, tmp_path / "out")
    again = load_artifact(tmp_path / "out")
    assert torch.equal(logits(again.network), logits(model.network))
    assert again.anatomy.expert_shape() == model.anatomy.expert_shape() != []
    assert [mixture.num_experts for mixture in anatomy_of(skeleton(tmp_path / "out")).mixtures] == numbers


@pytest.mark.parametrize("counts", ["free", "uniform"])
def test_a_budget_removes_no_more_than_it_must(counts: str, tmp_path: Path) -> None:
    """An expert has three matrices and a row of the router."""
    model = loaded("olmoe", tmp_path)
    cost, step = 3 * HIDDEN * INNER + HIDDEN, 1 if counts == "free" else len(model.anatomy.mixtures)
    assert [expert_parameters(mixture) for mixture in model.anatomy.mixtures] == [cost, cost]
    before = block_parameters(model.anatomy)
    facts = apply(model, "reap", 1 - 2 * cost / before, experts_per_layer=counts)
    assert facts["parameters_removed"] == 2 * cost, "two experts meet it exactly"
    facts = apply(loaded("olmoe", tmp_path), "reap", 1 - (2 * cost + 1) / before, experts_per_layer=counts)
    assert facts["parameters_removed"] == (2 + step) * cost, "and one parameter more takes the next"


def test_the_layers_of_low_scores_lose_experts_until_a_token_needs_all_that_stay(tmp_path: Path) -> None:
    model = loaded("olmoe", tmp_path)
    three = 3 * (3 * HIDDEN * INNER + HIDDEN) / block_parameters(model.anatomy)  # experts
    method: Any = METHODS.build({"method": "reap", "budget": {"parameters": 1 - three}})
    scores = [np.array([0.1, 0.4, 0.2, 0.3]), np.array([4.0, 3.0, 2.0, 1.0])]
    assert [kept.tolist() for kept in method.choose(model.anatomy, scores)] == [[1, 3], [0, 1, 2]]
    uniform: Any = METHODS.build({"method": "reap", "budget": {"parameters": 0.9}, "experts_per_layer": "uniform"})
    assert [kept.tolist() for kept in uniform.choose(model.anatomy, scores)] == [[1, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("counts", ["free", "uniform"])
def test_the_planned_shape_is_that_of_the_result(counts: str, tmp_path: Path) -> None:
    model, planned = loaded("olmoe", tmp_path), loaded("olmoe", tmp_path)
    method: Any = METHODS.build({"method": "reap", "budget": {"parameters": 0.8}, "experts_per_layer": counts})
    method.apply(model, MethodContext(batches=batches()))
    assert method.reshape(planned.anatomy, {}) == {}
    assert block_parameters(planned.anatomy) == block_parameters(model.anatomy)
    assert method.keeps_plain_shape is (counts == "uniform")
    size = CalibrationSize(samples=6, seq_len=20, batch_size=3)
    states = 4 * 120 * HIDDEN
    assert [method.estimate_resources(planned.anatomy, size, limit) for limit in (None, 2**30, 1000)] == [
        ResourceEstimate(1.0, states), ResourceEstimate(1.0, states), ResourceEstimate(1.0, 1000)
    ]  # fmt: skip


def test_each_layer_may_keep_another_number_in_artifact_and_engine(tmp_path: Path) -> None:
    """In a new process too, and in the compiled engine as in transformers' generation."""
    for name in PLAIN:
        network = split_experts(copy.deepcopy(fused(name)))
        for mixture, kept in zip(anatomy_of(network).mixtures, ([1, 3], [0, 1, 3]), strict=True):
            keep_experts(network, mixture, kept)
        (tmp_path / name).mkdir()
        save_artifact(Model(network), tmp_path / name)
        again = load_artifact(tmp_path / name)
        assert [mixture.kept for mixture in again.anatomy.mixtures] == [(1, 3), (0, 1, 3)]
        per_layer = json.loads((tmp_path / name / "config.json").read_text())["per_layer_config"]
        assert [[n for key, n in per_layer[i].items() if "experts" in key] for i in "01"] == [[2], [3]]
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        engine = Engine(again, **SMALL)
        assert engine.backend.startswith("compiled-cpu")
        assert answers(engine, prompts(3), params) == [expected(network, text, 4) for text in prompts(3)]
    verify(load_artifact(tmp_path / "olmoe"), tmp_path / "olmoe")


def test_equal_counts_load_in_transformers(tmp_path: Path) -> None:
    import transformers

    model = loaded("mixtral", tmp_path / "source")
    apply(model, "reap", 0.8, experts_per_layer="uniform")
    (tmp_path / "out").mkdir()
    save_artifact(model, tmp_path / "out")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(reference), logits(model.network), atol=2e-6, rtol=0)


def test_experts_are_pruned_and_then_their_channels(tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path / "source")
    apply(model, "reap", 0.8)
    numbers = [mixture.num_experts for mixture in model.anatomy.mixtures]
    METHODS.build({"method": "magnitude", "budget": {"parameters": 0.8}, "repair": "none"}).apply(
        model, MethodContext()
    )
    (tmp_path / "out").mkdir()
    save_artifact(model, tmp_path / "out")
    again = load_artifact(tmp_path / "out")
    assert [mixture.num_experts for mixture in again.anatomy.mixtures] == numbers
    assert torch.equal(logits(again.network), logits(model.network))


def test_merging_identical_experts_changes_nothing(tmp_path: Path) -> None:
    """The second expert is the first with its channels in another order: only the alignment finds that."""
    model = loaded("olmoe", tmp_path)
    first, second = model.anatomy.mixtures[0].module[:2]
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        second.gate_proj.weight.copy_(first.gate_proj.weight[order])
        second.up_proj.weight.copy_(first.up_proj.weight[order])
        second.down_proj.weight.copy_(first.down_proj.weight[:, order])
    original, unaligned = copy.deepcopy(first), copy.deepcopy(first)
    merge_experts([first, second], torch.tensor([1.0, 3.0]), align=True)
    merge_experts([unaligned, second], torch.tensor([1.0, 3.0]), align=False)
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(first.get_parameter(name), parameter)
        assert not torch.allclose(unaligned.get_parameter(name), parameter, atol=1e-3)


def test_merging_averages_by_tokens_and_groups_by_similarity(tmp_path: Path) -> None:
    model = loaded("olmoe", tmp_path)
    first, second = model.anatomy.mixtures[0].module[:2]
    one, two = (copy.deepcopy(expert.up_proj.weight.detach()) for expert in (first, second))
    merge_experts([first, second], torch.tensor([1.0, 3.0]), align=False)
    torch.testing.assert_close(first.up_proj.weight.detach(), 0.25 * one + 0.75 * two)
    similarity = np.array([[1, 0.1, 0.9, 0.2], [0.1, 1, 0.3, 0.8], [0.9, 0.3, 1, 0], [0.2, 0.8, 0, 1]])
    assert group_experts(similarity, np.array([0, 1])) == {0: [2], 1: [3]}


def test_experts_without_tokens_count_alike(tmp_path: Path) -> None:
    first, second = loaded("olmoe", tmp_path).anatomy.mixtures[0].module[:2]
    mean = (first.up_proj.weight + second.up_proj.weight).detach() / 2
    merge_experts([first, second], torch.zeros(2), align=False)
    torch.testing.assert_close(first.up_proj.weight.detach(), mean)


@pytest.mark.parametrize("align", [True, False])
def test_the_experts_that_leave_are_merged_into_those_that_stay(align: bool, tmp_path: Path) -> None:
    model, oracle = loaded("olmoe", tmp_path), loaded("olmoe", tmp_path)
    apply(model, "expert-merging", 0.8, align=align)
    merged = 0
    for mixture, whole, statistics in zip(
        model.anatomy.mixtures, oracle.anatomy.mixtures, observed(oracle), strict=True
    ):
        assert set(np.argsort(statistics.tokens.numpy())[-mixture.num_experts :].tolist()) == set(mixture.kept)
        for expert, leader in zip(mixture.module, mixture.kept, strict=True):
            rest = [index for index in range(EXPERTS) if index not in mixture.kept]
            members = [i for i in rest if max(mixture.kept, key=lambda k: float(statistics.similarity[i, k])) == leader]
            group = [leader, *members]
            experts = [copy.deepcopy(whole.module[index]) for index in group]
            merge_experts(experts, torch.stack([statistics.tokens[index] for index in group]), align=align)
            assert all(map(torch.equal, expert.parameters(), experts[0].parameters()))
            merged += len(members)
    assert merged > 0


def test_experts_of_other_widths_are_not_merged(tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path)
    keep_units(model.network, next(part for part in model.anatomy.parts if part.mixture is not None), list(range(40)))
    with pytest.raises(ModelError, match=r"the experts of model.layers.0.mlp.experts differ in width"):
        apply(model, "expert-merging", 0.8)


def collapsed(tmp_path: Path) -> Model:
    """Return a mixture whose second router chooses the same two experts for every token."""
    model = loaded("mixtral", tmp_path)
    network: Any = model.network
    with torch.no_grad():
        block = network.model.layers[1]
        block.post_attention_layernorm.weight.zero_()
        block.post_attention_layernorm.weight[0] = 1
        network.get_input_embeddings().weight[:, 0] = 0.5
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            for expert in layer.mlp.experts:
                expert.w2.weight[0] = 0
        block.mlp.gate.weight.copy_(torch.arange(4.0)[:, None].expand_as(block.mlp.gate.weight))
    return model


@pytest.mark.parametrize("method", ["reap", "expert-frequency", "expert-merging"])
def test_a_router_that_uses_the_same_experts_for_all_tokens_is_an_error(method: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"layers.1.mlp.gate sends every calibration token to the same 2 experts of 4"):
        apply(collapsed(tmp_path), method, 0.8)


def test_bad_budgets_and_networks(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a budget of macs has no effect; give one of parameters"):
        METHODS.build({"method": "reap", "budget": {"macs": 0.5}})
    with pytest.raises(RecipeError, match="experts_per_layer of reap"):
        METHODS.build({"method": "reap", "budget": {"parameters": 0.5}, "experts_per_layer": "equal"})
    with pytest.raises(BudgetError, match="with no more experts than a token uses in every layer, 63 % of"):
        apply(loaded("mixtral", tmp_path / "a"), "reap", 0.1)
    for method in METHOD_NAMES:
        with pytest.raises(ModelError, match="this llama network has no mixture of experts"):
            apply(Model(DENSE["llama"]()), method, 0.5)
    model = loaded("mixtral", tmp_path / "b")
    with pytest.raises(ModelError, match="routes each token to 2 experts, so at least as many must stay, not 1"):
        keep_experts(model.network, model.anatomy.mixtures[0], [0])
    model.anatomy.mixtures[0].router.num_group = 2
    with pytest.raises(ModelError, match="chooses among 2 groups of equal size"):
        apply(model, "reap", 0.8)


@pytest.mark.parametrize(
    "entry",
    [
        {"mixture": "model.layers.0.mlp.experts", "of": 4, "kept": [0, 4]},
        {"mixture": "model.layers.0.mlp.experts", "of": 4, "kept": [0]},
        {"mixture": "model.layers.0.mlp.experts", "of": 4, "kept": [1, 0]},
        {"mixture": "model.layers.0.mlp.experts", "of": 8, "kept": [0, 1]},
        {"mixture": "model.layers.0.mlp.experts", "of": 4, "kept": "01"},
        {"mixture": "model.layers.9.mlp.experts", "of": 4, "kept": [0, 1]},
        7,
    ],
)
def test_a_forged_number_of_experts_is_refused(entry: Any, tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path / "source")
    keep_experts(model.network, model.anatomy.mixtures[0], [0, 2])
    (tmp_path / "out").mkdir()
    save_artifact(model, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "smelt.json").read_text())
    content["experts"] = [entry]
    (tmp_path / "out" / "smelt.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"in smelt\.json"):
        load_artifact(tmp_path / "out")


def test_the_load_balancing_loss_is_switched_off(tmp_path: Path) -> None:
    """transformers computes it from router logits of all layers, which must then have the same number of experts."""
    model = loaded("olmoe", tmp_path)
    model.network.config.output_router_logits = True
    keep_experts(model.network, model.anatomy.mixtures[0], [0, 1, 2])
    batch = ids()
    assert bool(model.network(**batch, labels=batch["input_ids"]).loss.isfinite())


def test_every_mixture_can_be_observed(tmp_path: Path) -> None:
    for name in BUILDS:
        assert all(each.tokens.sum() > 0 for each in observed(loaded(name, tmp_path / name)))
